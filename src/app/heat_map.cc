#include "app/heat_map.h"

#include <fmt/core.h>

#include <algorithm>

namespace weft {
namespace {

constexpr int kLeft = 72, kTop = 64, kWidth = 84, kHeight = 40;

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  return out;
}

// Dark to light, so that it also reads in grey and to the colour-blind.
std::string color(double share) {
  constexpr int kFrom[3] = {68, 40, 110}, kMiddle[3] = {44, 145, 140}, kTo[3] = {250, 225, 90};
  const double x = 2 * std::clamp(share, 0.0, 1.0), t = x < 1 ? x : x - 1;
  const int* a = x < 1 ? kFrom : kMiddle;
  const int* b = x < 1 ? kMiddle : kTo;
  const auto mix = [&](int i) { return static_cast<int>(a[i] + t * (b[i] - a[i])); };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2));
}

std::string text(int x, int y, const char* anchor, const char* fill, const std::string& words) {
  return fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\" fill=\"{}\">{}</text>\n", x, y, anchor, fill,
                     escaped(words));
}

}  // namespace

std::string svg(const HeatMap& map) {
  const int columns = static_cast<int>(map.columns.size()), rows = static_cast<int>(map.rows.size());
  const int width = std::max(kLeft + columns * kWidth + 16, 16 + 7 * static_cast<int>(map.title.size()));
  const int height = kTop + rows * kHeight + 16;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" "
      "fill=\"#ffffff\"/>\n",
      width, height);
  out += text(16, 22, "start", "#222222", map.title);
  out += text(kLeft - 10, kTop - 10, "end", "#666666", map.row_title);
  for (int c = 0; c < columns; ++c)
    out += text(kLeft + c * kWidth + kWidth / 2, kTop - 10, "middle", "#222222",
                c == 0 ? map.columns[c] + " " + map.column_title : map.columns[c]);
  for (int r = 0; r < rows; ++r) {
    out += text(kLeft - 10, kTop + r * kHeight + kHeight / 2 + 5, "end", "#222222", map.rows[r]);
    for (int c = 0; c < columns; ++c) {
      const double share = map.cells[r][c];
      const int x = kLeft + c * kWidth, y = kTop + r * kHeight;
      out += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>\n", x, y,
                         kWidth - 2, kHeight - 2, color(share));
      out += text(x + kWidth / 2 - 1, y + kHeight / 2 + 4, "middle", share > 0.6 ? "#222222" : "#ffffff",
                  fmt::format("{:.0f} %", 100 * share));
    }
  }
  return out + "</svg>\n";
}

}  // namespace weft
