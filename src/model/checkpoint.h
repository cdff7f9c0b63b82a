// A model folder as Hugging Face lays it out: config.json and model.safetensors, or
// model.safetensors.index.json with shards. Also takes the root of a download cache entry
// (models--owner--name) and follows its refs/main.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/safetensors.h"

namespace weft {

class Checkpoint {
 public:
  // error: one line naming the file (and tensor). Maps every shard, keeps no descriptor open.
  explicit Checkpoint(const std::string& path);

  // Null when absent; looking does not count as use. Infos live as long as the checkpoint.
  const TensorInfo* find(std::string_view name) const;
  // Counts as use. error: absent, naming the folder.
  const TensorInfo& use(std::string_view name) const;
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // sorted by name
  std::vector<std::string_view> names() const;                         // sorted

  // After packing: gives the tensor's pages back. Safe from several threads.
  void release(const TensorInfo& tensor) const { release_pages(tensor); }

  // What nobody used, for one line of log: "41 tensors not used: model.layers.48 (38), vision_tower (3)"; ""
  // if none.
  std::string unused_summary() const;

  const std::string& path() const {
    return path_;
  }  // the folder that holds config.json, as given where possible
  std::string config_path() const { return path_ + "/config.json"; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string name() const;  // never empty: "owner/name" for a download cache, else the folder's name

  // Same for every spelling of the folder's path; changes with config.json and with the name, size, time of
  // change or header of a weight file.
  uint64_t identity() const { return identity_; }

  // Call right before packing: see SafetensorsFile::check_unchanged().
  void check_unchanged() const;

 private:
  void open_index(const std::string& index_path);
  void compute_identity();

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;  // in the order of their names
  std::vector<TensorInfo> tensors_;
  std::unique_ptr<std::atomic<bool>[]> used_;  // parallel to tensors_
  uint64_t identity_ = 0;
};

// The folder that holds the model `path` names: `path` without trailing slashes, or the snapshot a download
// cache entry's refs/main points to. error: says what is there instead.
std::string resolve_model_folder(const std::string& path);

}  // namespace weft
