#include "model/checkpoint.h"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>

#include "base/check.h"
#include "base/json.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// "" unless `path` is a link whose target is missing.
std::string dangling_target(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error) || fs::exists(path, error)) return "";
  return fs::read_symlink(path, error).string();
}

void refuse_dangling(const std::string& path) {
  const std::string target = dangling_target(path);
  if (!target.empty()) fail("{} is a link to {}, which does not exist", printable(path), printable(target));
}

std::vector<std::string> list(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::string join_some(const std::vector<std::string>& names, size_t most = 3) {
  std::string text;
  for (size_t i = 0; i < std::min(most, names.size()); ++i)
    text += (i == 0 ? "" : ", ") + printable(names[i], 120);
  return names.size() > most ? text + fmt::format(" and {} more", names.size() - most) : text;
}

bool plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

// The first parts of a tensor's name: up to and with the layer number ("model.layers.61"), else all but the
// last two.
std::string prefix_of(std::string_view name) {
  for (size_t at = 0; at < name.size();) {
    const size_t dot = std::min(name.find('.', at), name.size());
    const std::string_view part = name.substr(at, dot - at);
    if (!part.empty() && part.find_first_not_of("0123456789") == part.npos)
      return std::string(name.substr(0, dot));
    at = dot + 1;
  }
  const size_t last = name.rfind('.');
  if (last == name.npos || last == 0) return std::string(name);
  const size_t before = name.rfind('.', last - 1);
  return std::string(name.substr(0, before == name.npos ? last : before));
}

[[noreturn]] void refuse_folder(const std::string& folder) {
  refuse_dangling(folder + "/" + kSingle);
  refuse_dangling(folder + "/" + kIndex);
  std::vector<std::string> weights;
  for (const std::string& name : list(folder)) {
    for (const char* end : {".safetensors", ".bin", ".gguf", ".pt", ".pth"})
      if (name.ends_with(end)) weights.push_back(name);
  }
  fail("{}: neither {} nor {} in this folder{}", printable(folder), kSingle, kIndex,
       weights.empty() ? "" : fmt::format(" (it holds {})", join_some(weights)));
}

}  // namespace

std::string resolve_model_folder(const std::string& path) {
  std::string folder = path;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  if (folder.empty()) fail("the model path is empty: give the folder that holds config.json");
  refuse_dangling(folder);
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (status.type() == fs::file_type::not_found) fail("{}: no such file or directory", printable(folder));
  if (error) fail("{}: {}", printable(folder), error.message());
  if (!fs::is_directory(status))
    fail("{} is a file: give the folder that holds config.json", printable(folder));
  if (exists(folder + "/config.json") || !fs::is_directory(folder + "/snapshots", error)) return folder;

  const std::string reference = folder + "/refs/main";
  if (exists(reference)) {
    std::string commit = read_file(reference);
    commit.erase(commit.find_last_not_of(" \t\r\n") + 1);
    const std::string snapshot = folder + "/snapshots/" + commit;
    if (plain_name(commit) && fs::is_directory(snapshot, error)) return snapshot;
    fail("{} names snapshot {}, which is not in {}/snapshots: download the model again", printable(reference),
         printable(commit, 80), printable(folder));
  }
  fail("{} is a download cache without refs/main: give one of its snapshot folders ({})", printable(folder),
       join_some(list(folder + "/snapshots")));
}

Checkpoint::Checkpoint(const std::string& path) : path_(resolve_model_folder(path)) {
  // A single file wins over an index beside it, as in every other reader of these folders.
  if (exists(file(kSingle))) {
    files_.push_back(std::make_unique<SafetensorsFile>(file(kSingle)));
  } else if (exists(file(kIndex))) {
    open_index(file(kIndex));
  } else {
    refuse_folder(path_);
  }
  for (const auto& shard : files_) {
    std::vector<TensorInfo> taken = shard->take_tensors();
    tensors_.insert(tensors_.end(), std::make_move_iterator(taken.begin()),
                    std::make_move_iterator(taken.end()));
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  used_ = std::make_unique<std::atomic<bool>[]>(tensors_.size());
  compute_identity();
}

void Checkpoint::open_index(const std::string& index_path) {
  const std::string where = printable(index_path);
  const Json index = parse_json_file(index_path);
  const Fields fields(index, index_path);
  const Json& map = fields.object("weight_map").json();
  if (map.empty()) fail("{}: weight_map is empty", where);
  std::map<std::string, std::vector<std::string>> shards;  // file name -> tensors, both sorted
  for (const auto& [tensor, value] : map.items()) {
    if (!value.is_string()) fail("{}: the file of tensor {} is not a string", where, printable(tensor));
    const std::string& shard = value.get_ref<const std::string&>();
    if (!plain_name(shard)) {
      fail("{}: tensor {} is in \"{}\", expected the name of a file in the same folder", where,
           printable(tensor), printable(shard, 100));
    }
    shards[shard].push_back(tensor);
  }
  // All absent shards at once: a download that stopped half-way misses many.
  std::vector<std::string> absent;
  for (const auto& [shard, tensors] : shards) {
    refuse_dangling(file(shard));
    if (!exists(file(shard))) absent.push_back(shard);
  }
  if (!absent.empty()) {
    fail("{}: {} of {} shards are missing: {}: download the model again", where, absent.size(), shards.size(),
         join_some(absent));
  }
  for (const auto& [shard, listed] : shards) {
    files_.push_back(std::make_unique<SafetensorsFile>(file(shard)));
    std::vector<std::string> held;
    for (const TensorInfo& tensor : files_.back()->tensors()) held.push_back(tensor.name);
    std::sort(held.begin(), held.end());
    std::vector<std::string> lost, unlisted;
    std::set_difference(listed.begin(), listed.end(), held.begin(), held.end(), std::back_inserter(lost));
    std::set_difference(held.begin(), held.end(), listed.begin(), listed.end(), std::back_inserter(unlisted));
    if (!lost.empty())
      fail("{}: tensor {} should be in {}, which does not hold it", where, join_some(lost), printable(shard));
    // An index that lacks tensors is older than its shards, or was written by a tool that forgot the scales.
    if (!unlisted.empty()) {
      fail("{} does not list tensor {} of {}: index and shards are not of one download", where,
           join_some(unlisted), printable(shard));
    }
  }
}

void Checkpoint::compute_identity() {
  std::string text;
  for (const auto& shard : files_) {
    text += fs::path(shard->path()).filename().string();
    text += fmt::format("\n{:016x}\n", shard->identity());
  }
  if (exists(config_path())) text += read_file(config_path());
  identity_ = XXH3_64bits(text.data(), text.size());
}

const TensorInfo* Checkpoint::find(std::string_view name) const {
  const auto at =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorInfo& tensor, std::string_view key) { return tensor.name < key; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

const TensorInfo& Checkpoint::use(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) fail("{}: the weights hold no tensor {}", printable(path_), printable(name));
  used_[static_cast<size_t>(tensor - tensors_.data())].store(true, std::memory_order_relaxed);
  return *tensor;
}

std::vector<std::string_view> Checkpoint::names() const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const TensorInfo& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

std::string Checkpoint::unused_summary() const {
  std::map<std::string, size_t> counts;
  size_t total = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (used_[i].load(std::memory_order_relaxed)) continue;
    ++counts[prefix_of(tensors_[i].name)];
    ++total;
  }
  if (total == 0) return "";
  std::vector<std::pair<std::string, size_t>> groups(counts.begin(), counts.end());
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> parts;
  for (const auto& [prefix, count] : groups) parts.push_back(fmt::format("{} ({})", prefix, count));
  return fmt::format("{} tensors not used: {}", total, join_some(parts, 5));
}

std::string Checkpoint::name() const {
  std::error_code error;
  const fs::path real = fs::canonical(path_, error);
  const std::string cache = real.parent_path().parent_path().filename().string();
  if (real.parent_path().filename() == "snapshots" && cache.starts_with("models--")) {
    const size_t cut = cache.find("--", 8);
    if (cut != cache.npos) return cache.substr(8, cut - 8) + "/" + cache.substr(cut + 2);
    if (cache.size() > 8) return cache.substr(8);
  }
  const std::string given = fs::path(path_).filename().string();
  if (plain_name(given)) return given;
  return real.has_filename() ? real.filename().string() : "model";
}

void Checkpoint::check_unchanged() const {
  for (const auto& shard : files_) shard->check_unchanged();
}

}  // namespace weft
