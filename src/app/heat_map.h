// A table of shares in 0..1 as an SVG picture: a colour and a figure in each cell.
#pragma once

#include <string>
#include <vector>

namespace weft {

struct HeatMap {
  std::string title, column_title, row_title;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<double>> cells;  // [row][column]
};
std::string svg(const HeatMap& map);

}  // namespace weft
