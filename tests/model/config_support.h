// Reading golden config.json files, changed or not, for the config tests.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/check.h"
#include "model/arch.h"

namespace weft {

namespace fs = std::filesystem;

inline std::string golden_path(const std::string& folder) {
  return std::string(WEFT_SOURCE_DIR) + "/tests/golden/" + folder + "/config.json";
}
inline Json golden(const std::string& folder) {
  return parse_json_file(golden_path(folder));
}

inline ModelConfig read(const Json& json, const std::string& where = "config.json") {
  const Arch& arch = find_arch(json, where, nullptr);
  ModelConfig config = arch.read(json, where, nullptr);
  EXPECT_EQ(config.family, arch.family);
  return config;
}
inline ModelConfig read_golden(const std::string& folder) {
  return read(golden(folder), golden_path(folder));
}

inline std::vector<int> layers_where(const ModelConfig& config, bool (*yes)(const LayerSpec&)) {
  std::vector<int> ids;
  for (int i = 0; i < config.num_layers(); ++i) {
    if (yes(config.layers[static_cast<size_t>(i)])) ids.push_back(i);
  }
  return ids;
}
inline bool is_mla(const LayerSpec& layer) {
  return layer.mixer == Mixer::mla;
}
inline bool is_moe(const LayerSpec& layer) {
  return layer.moe;
}
inline bool owns_index(const LayerSpec& layer) {
  return layer.own_indexer;
}
inline bool shares_index(const LayerSpec& layer) {
  return layer.shared_index;
}

inline std::string error_of(const Json& json, const std::string& where = "config.json") {
  try {
    const Arch& arch = find_arch(json, where, nullptr);
    arch.read(json, where, nullptr);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

inline void expect_error(const Json& json, const std::string& fragment,
                         const std::string& where = "config.json") {
  const std::string message = error_of(json, where);
  EXPECT_NE(message.find(fragment), message.npos) << "message:  " << message << "\nexpected: " << fragment;
  EXPECT_EQ(message.find('\n'), message.npos);
  EXPECT_EQ(message.find(where.substr(0, where.rfind('/') + 1)), 0u) << message;
}

// `value` as JSON text at a JSON pointer; empty text removes the key.
inline Json changed(Json json, const std::string& pointer, const std::string& value) {
  const Json::json_pointer at(pointer);
  if (value.empty()) {
    json.at(at.parent_pointer()).erase(at.back());
  } else {
    json[at] = Json::parse(value);
  }
  return json;
}

}  // namespace weft
