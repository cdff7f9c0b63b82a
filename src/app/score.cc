#include "app/score.h"

#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/check.h"

namespace weft {
namespace {

constexpr char kMagic[] = "WEFTLGT1";
constexpr int kMaxCode = 65535;

struct RowHead {
  float top, step;
};

}  // namespace

std::vector<Window> sliding_windows(int tokens, int window, int stride) {
  if (window < 2) usage("-c {}: a window needs at least 2 tokens", window);
  if (stride < 1 || stride >= window)
    usage("--stride {}: expected 1 to {}: the first token of a window of {} is predicted by none", stride,
          window - 1, window);
  std::vector<Window> windows;
  for (int begin = 0, done = 1; done < tokens; begin += stride) {
    const int end = std::min(begin + window, tokens);
    if (end > done) windows.push_back({begin, done, end});
    done = end;
  }
  return windows;
}

double log_sum_exp(std::span<const float> logits) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - top);
  const double lse = top + std::log(sum);
  if (!std::isfinite(lse)) fail("NaN or infinity in the logits");
  return lse;
}

void score(Direct& direct, std::span<const int32_t> tokens, const std::vector<Window>& windows,
           const ScoreHooks& hooks) {
  const int vocab = direct.config().vocab;
  int64_t total = 0, read = 0;
  for (const Window& w : windows) total += w.end - 1 - w.begin;
  int rows = 0;
  for (const Window& w : windows) {
    direct.restart();
    // The last token predicts nothing that counts.
    for (int at = w.begin; at < w.end - 1;) {
      const int n = std::min(direct.chunk(), w.end - 1 - at), first = std::max(0, w.scored - 1 - at);
      direct.forward(tokens.subspan(at, n), first < n ? WantLogits::all : WantLogits::none);
      if (first < n) {
        std::vector<std::string> errors(n - first);
        if (hooks.rows_about) hooks.rows_about(n - first);
        direct.team().run(n - first, [&](int k, int) {
          try {
            hooks.row(rows + k, at + first + k + 1,
                      {direct.model().logits(first + k), static_cast<size_t>(vocab)});
          } catch (const Error& error) {
            errors[k] = error.what();
          }
        });
        for (int k = 0; k < n - first; ++k)
          if (!errors[k].empty())
            fail("{} at token {} of the text: first NaN or Inf in {}", errors[k], at + first + k,
                 direct.model().first_nonfinite(first + k));
        rows += n - first;
        if (hooks.rows_done) hooks.rows_done(rows);
      }
      at += n, read += n;
      if (hooks.progress) hooks.progress(read, total);
    }
  }
}

LogitWriter::LogitWriter(const std::string& path, const LogitHeader& header, int rows) : path_(path) {
  file_ = std::fopen((path + ".part").c_str(), "wb");
  if (!file_) fail("cannot write {}: {}", printable(path), std::strerror(errno));
  const std::string json = Json{{"model", header.model},          {"vocab", header.vocab},
                                {"tokens", header.tokens.size()}, {"rows", rows},
                                {"window", header.window},        {"stride", header.stride},
                                {"text_hash", header.text_hash}}
                               .dump(-1, ' ', false, Json::error_handler_t::replace);
  const auto length = static_cast<uint32_t>(json.size());
  const auto bytes = [](const void* data, size_t n) {
    return std::span(static_cast<const std::byte*>(data), n);
  };
  write(bytes(kMagic, 8));
  write(bytes(&length, 4));
  write(bytes(json.data(), json.size()));
  write(bytes(header.tokens.data(), header.tokens.size() * sizeof(int32_t)));
}

LogitWriter::~LogitWriter() {
  if (!file_) return;
  std::fclose(file_);
  std::error_code ignored;
  std::filesystem::remove(path_ + ".part", ignored);
}

void LogitWriter::encode(std::span<const float> logits, double lse, std::byte* row) {
  const auto [low, high] = std::minmax_element(logits.begin(), logits.end());
  const double range = std::min(static_cast<double>(*high) - *low, kLogitRange);
  const RowHead head{static_cast<float>(*high - lse), static_cast<float>(std::max(range, 1e-6) / kMaxCode)};
  std::memcpy(row, &head, sizeof head);
  auto* code = reinterpret_cast<uint16_t*>(row + sizeof head);
  const float top = *high, scale = 1 / head.step;
  for (size_t i = 0; i < logits.size(); ++i)
    code[i] = static_cast<uint16_t>(std::min((top - logits[i]) * scale + 0.5f, static_cast<float>(kMaxCode)));
}

void LogitWriter::write(std::span<const std::byte> rows) {
  if (std::fwrite(rows.data(), 1, rows.size(), file_) != rows.size())
    fail("cannot write {}: {}", printable(path_), std::strerror(errno));
}

void LogitWriter::finish() {
  const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
  std::error_code error;
  if (closed) std::filesystem::rename(path_ + ".part", path_, error);
  if (!closed || error)
    fail("cannot write {}: {}", printable(path_), error ? error.message() : std::strerror(errno));
}

LogitReader::LogitReader(const std::string& path) : path_(path) {
  file_ = std::fopen(path.c_str(), "rb");
  if (!file_) fail("cannot read {}: {}", printable(path), std::strerror(errno));
  char magic[8] = {};
  uint32_t length = 0;
  const auto take = [&](void* out, size_t n) { return std::fread(out, 1, n, file_) == n; };
  if (!take(magic, 8) || std::memcmp(magic, kMagic, 8) != 0)
    fail("{} is no reference run of weft eval ppl --save-logits", printable(path));
  std::string json;
  std::error_code ignored;
  const size_t size = std::filesystem::file_size(path, ignored);
  if (take(&length, 4) && length < size) {
    json.resize(length);
    if (!take(json.data(), length)) json.clear();
  }
  if (json.empty()) fail("{} is cut short in its header", printable(path));
  const Json parsed = parse_json(json, path);
  const Fields f(parsed, path);
  header_.model = f.string("model");
  header_.vocab = static_cast<int>(f.integer("vocab", 1, INT32_MAX));
  header_.window = static_cast<int>(f.integer("window", 2, INT32_MAX));
  header_.stride = static_cast<int>(f.integer("stride", 1, INT32_MAX));
  header_.text_hash = f.string("text_hash");
  const auto tokens = static_cast<size_t>(f.integer("tokens", 1, INT32_MAX));
  rows_ = static_cast<int>(f.integer("rows", 1, INT32_MAX));
  const size_t expected = 12 + length + tokens * 4 + rows_ * logit_row_bytes(header_.vocab);
  if (size != expected)
    fail("{}: {} bytes where its header says {}: cut short or damaged", printable(path), size, expected);
  header_.tokens.resize(tokens);
  if (!take(header_.tokens.data(), tokens * 4))
    fail("cannot read {}: {}", printable(path), std::strerror(errno));
}

LogitReader::~LogitReader() {
  if (file_) std::fclose(file_);
}

void LogitReader::read(int rows, std::vector<std::byte>& out) {
  out.resize(rows * logit_row_bytes(header_.vocab));
  if (std::fread(out.data(), 1, out.size(), file_) != out.size())
    fail("cannot read {}: {}", printable(path_), std::strerror(errno));
}

Divergence compare_row(const std::byte* reference, std::span<const float> logits, double lse, int target) {
  RowHead head;
  std::memcpy(&head, reference, sizeof head);
  const auto* code = reinterpret_cast<const uint16_t*>(reference + sizeof head);
  // With w = exp(-step code), Z its sum: KL = sum w / Z (log w - log Z - logit + lse).
  double sum = 0, weighted = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float below = -head.step * static_cast<float>(code[i]);
    const double w = std::exp(below);
    sum += w;
    weighted += w * (static_cast<double>(below) - logits[i]);
  }
  Divergence d;
  d.kl = std::max(0.0, weighted / sum - std::log(sum) + lse);
  d.reference_nll = head.step * static_cast<double>(code[target]) + std::log(sum);
  d.same_top = code[std::max_element(logits.begin(), logits.end()) - logits.begin()] == 0;
  return d;
}

std::string text_hash(std::string_view text) {
  return fmt::format("{:016x}", XXH64(text.data(), text.size(), 0));
}

}  // namespace weft
