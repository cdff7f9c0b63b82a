// A trusting reader of golden .safetensors files for tests (the product's own reader is a thing under test).
// A broken file or an unknown name ends the test by an exception.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace weft::testing {

class LiteSafetensors {
 public:
  explicit LiteSafetensors(const std::string& path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open golden file " + path);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    uint64_t header = 0;
    if (bytes_.size() < 8) throw std::runtime_error("golden file too short: " + path);
    std::memcpy(&header, bytes_.data(), 8);
    json_ = nlohmann::json::parse(bytes_.substr(8, header));
    data_ = 8 + header;
    json_.erase("__metadata__");
  }

  bool has(const std::string& name) const { return json_.contains(name); }

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& item : json_.items()) all.push_back(item.key());
    return all;
  }

  std::vector<int64_t> shape(const std::string& name) const { return entry(name)["shape"]; }
  std::string dtype(const std::string& name) const { return entry(name)["dtype"]; }

  // The elements as stored; T must have the element's size: float, double, uint16_t (BF16), uint8_t, int32_t,
  // ...
  template <class T>
  std::vector<T> get(const std::string& name) const {
    const auto& e = entry(name);
    int64_t count = 1;
    for (int64_t dim : shape(name)) count *= dim;
    size_t begin = e["data_offsets"][0], end = e["data_offsets"][1];
    if (end - begin != count * sizeof(T))
      throw std::runtime_error(path_ + ": wrong element type for " + name);
    std::vector<T> values(count);
    if (count) std::memcpy(values.data(), bytes_.data() + data_ + begin, end - begin);
    return values;
  }

 private:
  const nlohmann::json& entry(const std::string& name) const {
    if (!has(name)) throw std::runtime_error(path_ + " has no tensor " + name);
    return json_[name];
  }

  std::string path_, bytes_;
  nlohmann::json json_;
  size_t data_ = 0;
};

}  // namespace weft::testing
