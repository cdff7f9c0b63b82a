// A checkpoint in memory: read from a golden folder, changed, written elsewhere with the recorded outputs
// beside it.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/quantize.h"
#include "model/files_for_test.h"
#include "safetensors_lite.h"

namespace weft::testing {

struct Stored {
  std::string dtype;  // as in the header: "BF16"
  std::vector<int64_t> shape;
  std::string bytes;
};

class Rewrite {
 public:
  // Any number of weight files; they are written as one.
  explicit Rewrite(const std::string& folder) : folder_(folder) {
    std::ifstream in(folder + "/config.json");
    config = nlohmann::json::parse(in);
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
      const LiteSafetensors file(entry.path().string());
      for (const std::string& tensor : file.names())
        tensors[tensor] = {file.dtype(tensor), file.shape(tensor), bytes_of(file, tensor)};
    }
  }

  nlohmann::json config;
  std::map<std::string, Stored> tensors;
  nlohmann::json metadata;  // null: none
  int header_spaces = 0;    // behind the header's JSON
  std::string first;        // bytes of a U8 tensor in front of all others

  nlohmann::json& text() { return config.contains("text_config") ? config["text_config"] : config; }

  // The one tensor whose name ends so.
  const std::string& name(const std::string& tail) const {
    const std::string* found = nullptr;
    for (const auto& [name, tensor] : tensors)
      if (name.ends_with(tail)) {
        if (found) throw std::runtime_error("several tensors end with " + tail);
        found = &name;
      }
    if (!found) throw std::runtime_error("no tensor ends with " + tail);
    return *found;
  }
  Stored& tensor(const std::string& tail) { return tensors.at(name(tail)); }

  static std::vector<float> values(const Stored& t) {
    std::vector<float> out;
    const size_t size = t.dtype == "F32" ? 4 : 2;
    for (size_t i = 0; i < t.bytes.size(); i += size) {
      uint16_t half = 0;
      float value = 0;
      if (size == 4)
        std::memcpy(&value, t.bytes.data() + i, 4);
      else
        std::memcpy(&half, t.bytes.data() + i, 2);
      out.push_back(t.dtype == "BF16" ? bf16_to_float(half) : t.dtype == "F16" ? half_to_float(half) : value);
    }
    return out;
  }
  static void set_values(Stored& t, const std::vector<float>& values, const std::string& dtype) {
    t.dtype = dtype;
    t.bytes.clear();
    for (const float value : values) {
      const uint16_t half = dtype == "BF16" ? float_to_bf16(value) : float_to_half(value);
      if (dtype == "F32")
        t.bytes.append(reinterpret_cast<const char*>(&value), 4);
      else
        t.bytes.append(reinterpret_cast<const char*>(&half), 2);
    }
  }

  // E4M3 with one power-of-two scale per 128 x 128 block beside it; returns the values it then has, which
  // bf16 holds exactly.
  std::vector<float> quantise_fp8(const std::string& full_name) {
    Stored& t = tensors.at(full_name);
    const std::vector<float> x = values(t);
    const int64_t rows = t.shape.at(0), columns = t.shape.at(1), across = (columns + 127) / 128,
                  down = (rows + 127) / 128;
    std::vector<float> largest(static_cast<size_t>(down * across)), scale(largest.size()), exact(x.size());
    const auto block = [&](size_t i) {
      const int64_t r = static_cast<int64_t>(i) / columns, c = static_cast<int64_t>(i) % columns;
      return static_cast<size_t>(r / 128 * across + c / 128);
    };
    for (size_t i = 0; i < x.size(); ++i) largest[block(i)] = std::max(largest[block(i)], std::abs(x[i]));
    for (size_t i = 0; i < scale.size(); ++i)
      scale[i] = fp8_tile_scale(largest[i], TileScale::pow2_amax_floor);
    t.dtype = "F8_E4M3";
    t.bytes.clear();
    for (size_t i = 0; i < x.size(); ++i) {
      const uint8_t code = float_to_e4m3(x[i] / scale[block(i)]);
      t.bytes.push_back(static_cast<char>(code));
      exact[i] = e4m3_to_float(code) * scale[block(i)];
    }
    Stored& s = tensors[full_name + "_scale_inv"];
    s.shape = {down, across};
    set_values(s, scale, "F32");
    return exact;
  }

  // config.json, model.safetensors and what the golden folder says must come out.
  void write(const std::string& folder) const {
    nlohmann::ordered_json header;
    std::string data = first;
    if (!metadata.is_null()) header["__metadata__"] = metadata;
    const auto declare = [&](const std::string& name, const std::string& dtype,
                             const std::vector<int64_t>& shape, size_t begin, size_t end) {
      header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, end}}};
    };
    if (!first.empty()) declare("first", "U8", {static_cast<int64_t>(first.size())}, 0, first.size());
    for (const auto& [name, t] : tensors) {
      declare(name, t.dtype, t.shape, data.size(), data.size() + t.bytes.size());
      data += t.bytes;
    }
    std::filesystem::create_directories(folder);
    write_bytes(
        folder + "/model.safetensors",
        safetensors_bytes(header.dump() + std::string(static_cast<size_t>(header_spaces), ' '), data));
    write_bytes(folder + "/config.json", config.dump(1));
    for (const char* name : {"golden.json", "golden.safetensors"})
      if (std::filesystem::exists(folder_ + "/" + name) && !std::filesystem::exists(folder + "/" + name))
        std::filesystem::copy_file(folder_ + "/" + name, folder + "/" + name);
  }
  size_t header_bytes() const {  // without the spaces
    TemporaryFolder folder;
    Rewrite plain = *this;
    plain.header_spaces = 0;
    plain.write(folder.path());
    std::ifstream in(folder / "model.safetensors", std::ios::binary);
    uint64_t length = 0;
    in.read(reinterpret_cast<char*>(&length), 8);
    return length;
  }

 private:
  static std::string bytes_of(const LiteSafetensors& file, const std::string& name) {
    const std::string dtype = file.dtype(name);
    const auto text = [](const auto& v) {
      return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(v[0]));
    };
    if (dtype == "F32" || dtype == "I32") return text(file.get<uint32_t>(name));
    if (dtype == "BF16" || dtype == "F16") return text(file.get<uint16_t>(name));
    if (dtype == "F64" || dtype == "I64") return text(file.get<uint64_t>(name));
    return text(file.get<uint8_t>(name));
  }
  std::string folder_;
};

}  // namespace weft::testing
