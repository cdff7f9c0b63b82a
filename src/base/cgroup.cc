#include "base/cgroup.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <vector>

namespace weft {
namespace {

std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> found;
  constexpr std::string_view kSpace = " \t\r\n";
  for (size_t at = text.find_first_not_of(kSpace); at != text.npos; at = text.find_first_not_of(kSpace, at)) {
    size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    found.push_back(text.substr(at, end - at));
    at = end;
  }
  return found;
}

std::optional<int64_t> whole_number(std::string_view text) {
  auto parts = words(text);
  if (parts.size() != 1) return {};
  int64_t value = 0;
  auto [end, error] = std::from_chars(parts[0].begin(), parts[0].end(), value);
  if (error != std::errc() || end != parts[0].end()) return {};
  return value;
}

// Whether the comma-separated `names` hold `one`.
bool lists(std::string_view names, std::string_view one) {
  while (!names.empty()) {
    size_t end = std::min(names.find(','), names.size());
    if (names.substr(0, end) == one) return true;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return false;
}

// Folders of this process's group and its parents, innermost first. `controller` "" means v2. A container
// often sees a path that its own mount does not have: those files are absent, and the walk ends at the mount,
// which is its limit.
std::vector<std::string> group_folders(const ReadText& read, std::string_view controller) {
  std::string text = read("/proc/self/cgroup").value_or("");
  std::vector<std::string> folders;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line(text.data() + at, end - at);
    at = end + 1;
    size_t first = line.find(':'), second = line.find(':', first + 1);  // "id:controller,controller:/path"
    if (first == line.npos || second == line.npos) continue;
    std::string names(line.substr(first + 1, second - first - 1));
    bool mine = controller.empty() ? names.empty() : lists(names, controller);
    if (!mine) continue;
    std::vector<std::string> mounts;
    if (controller.empty())
      mounts = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
    else
      mounts = {"/sys/fs/cgroup/" + std::string(controller), "/sys/fs/cgroup/" + names};
    for (const std::string& mount : mounts) {
      std::string path(line.substr(second + 1));
      for (;;) {
        while (!path.empty() && path.back() == '/') path.pop_back();
        folders.push_back(mount + path);
        if (path.empty()) break;
        path.resize(path.find_last_of('/') == path.npos ? 0 : path.find_last_of('/'));
      }
    }
  }
  return folders;
}

template <class T>
void keep_smaller(std::optional<T>& best, std::optional<T> value) {
  if (value && (!best || *value < *best)) best = value;
}

uint64_t inactive_file(std::string_view stat, std::string_view key) {
  auto all = words(stat);
  for (size_t i = 0; i + 1 < all.size(); i += 2) {
    if (all[i] == key) return std::max<int64_t>(0, whole_number(all[i + 1]).value_or(0));
  }
  return 0;
}

std::optional<uint64_t> memory_left(const ReadText& read, const std::string& folder, const char* limit_file,
                                    const char* usage_file, const char* cache_key) {
  auto limit = whole_number(read(folder + limit_file).value_or(""));
  auto usage = whole_number(read(folder + usage_file).value_or(""));
  constexpr int64_t kUnlimited = int64_t{1} << 60;  // v1 writes "no limit" as the largest page multiple
  if (!limit || !usage || *limit <= 0 || *limit >= kUnlimited) return {};
  int64_t used =
      *usage - static_cast<int64_t>(inactive_file(read(folder + "/memory.stat").value_or(""), cache_key));
  return static_cast<uint64_t>(std::max<int64_t>(0, *limit - std::max<int64_t>(0, used)));
}

}  // namespace

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return {};
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<double> parse_cpu_cfs(std::string_view quota_us, std::string_view period_us) {
  auto quota = whole_number(quota_us), period = whole_number(period_us);
  if (!quota || !period || *quota <= 0 || *period <= 0) return {};
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::optional<double> parse_cpu_max(std::string_view text) {
  auto parts = words(text);
  if (parts.size() == 1) return parse_cpu_cfs(parts[0], "100000");  // the period may be left out
  return parts.size() == 2 ? parse_cpu_cfs(parts[0], parts[1]) : std::nullopt;
}

std::optional<double> cpu_quota(const ReadText& read) {
  std::optional<double> best;
  for (const std::string& folder : group_folders(read, "")) {
    keep_smaller(best, parse_cpu_max(read(folder + "/cpu.max").value_or("")));
  }
  for (const std::string& folder : group_folders(read, "cpu")) {
    keep_smaller(best, parse_cpu_cfs(read(folder + "/cpu.cfs_quota_us").value_or(""),
                                     read(folder + "/cpu.cfs_period_us").value_or("")));
  }
  return best;
}

std::optional<uint64_t> cgroup_memory_left(const ReadText& read) {
  std::optional<uint64_t> best;
  for (const std::string& folder : group_folders(read, "")) {
    keep_smaller(best, memory_left(read, folder, "/memory.max", "/memory.current", "inactive_file"));
  }
  for (const std::string& folder : group_folders(read, "memory")) {
    keep_smaller(best, memory_left(read, folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                   "total_inactive_file"));
  }
  return best;
}

}  // namespace weft
