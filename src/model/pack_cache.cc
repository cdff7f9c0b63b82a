#include "model/pack_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/check.h"

namespace weft {
namespace fs = std::filesystem;
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'p', 'a', 'c', 'k'};
constexpr uint32_t kVersion = 1;
constexpr size_t kPage = 4096;
constexpr size_t kBlock = size_t{16} << 20;
constexpr char kSuffix[] = ".weft";

struct Header {
  char magic[8];
  uint32_t version, reserved;
  uint64_t key, bytes, block, data_sum;
  uint64_t sum;  // of everything above
};

// By blocks, so that a whole team can work on it.
uint64_t data_sum(std::span<const std::byte> data, Team& team) {
  std::vector<uint64_t> sums((data.size() + kBlock - 1) / kBlock);
  team.run(static_cast<int>(sums.size()), [&](int i, int) {
    const size_t begin = static_cast<size_t>(i) * kBlock;
    sums[i] = XXH3_64bits(data.data() + begin, std::min(kBlock, data.size() - begin));
  });
  return XXH3_64bits(sums.data(), sums.size() * sizeof(uint64_t));
}

Header make_header(uint64_t key, std::span<const std::byte> data, Team& team) {
  Header h{};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.version = kVersion, h.key = key, h.bytes = data.size(), h.block = kBlock;
  h.data_sum = data_sum(data, team);
  h.sum = XXH3_64bits(&h, offsetof(Header, sum));
  return h;
}

// Letters, digits and dots of a model's name; what a file system may refuse becomes '-'.
std::string file_stem(const std::string& model) {
  std::string out;
  for (const char c : model.substr(0, 60))
    out += std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ? c : '-';
  return out.empty() ? "model" : out;
}

// Beyond a file-size limit write() raises SIGXFSZ, which would end the program; blocked, it returns EFBIG.
class BlockFileSizeSignal {
 public:
  BlockFileSizeSignal() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~BlockFileSizeSignal() {
    const int kept = errno;
    sigset_t pending;
    if (sigpending(&pending) == 0 &&
        sigismember(&pending, SIGXFSZ)) {  // or it would arrive at the unblocking
      sigset_t set;
      sigemptyset(&set);
      sigaddset(&set, SIGXFSZ);
      const timespec now{};
      sigtimedwait(&set, nullptr, &now);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = kept;
  }

 private:
  sigset_t before_;
};

bool write_all(int fd, const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes) {
    const ssize_t n = ::write(fd, from, std::min(bytes, kBlock));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    from += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

PackCache::PackCache(PackCacheOptions options, std::string model, uint64_t key, size_t bytes)
    : options_(std::move(options)), key_(key), bytes_(bytes) {
  if (bytes_ < options_.smallest) options_.folder.clear();
  if (!options_.folder.empty())
    path_ = fmt::format("{}/{}-{:016x}{}", options_.folder, file_stem(model), key_, kSuffix);
}

PackCache::~PackCache() {
  unmap();
  if (lock_ >= 0) ::close(lock_);
}

void PackCache::unmap() {
  if (mapped_) ::munmap(const_cast<std::byte*>(mapped_), mapped_bytes_);
  mapped_ = nullptr;
}

// Once: the rest of this start goes without a cache.
void PackCache::warn(const std::string& line) {
  if (options_.warn)
    options_.warn(fmt::format("{}; going on without the cache (--no-cache, --cache-dir)", line));
  path_.clear();
}

bool PackCache::map(Team& team) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  struct stat info = {};
  const size_t whole = kPage + bytes_;
  void* mapped = MAP_FAILED;
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && static_cast<size_t>(info.st_size) == whole)
    mapped = ::mmap(nullptr, whole, PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  if (mapped == MAP_FAILED) return false;
  mapped_ = static_cast<const std::byte*>(mapped);
  mapped_bytes_ = whole;
  // Reading all of it for the checksums is also what brings it into memory, by every thread of the team.
  const Header expected = make_header(key_, {mapped_ + kPage, bytes_}, team);
  if (std::memcmp(mapped_, &expected, sizeof expected) == 0) {
    ::utimensat(AT_FDCWD, path_.c_str(), nullptr, 0);  // used now
    return true;
  }
  unmap();
  return false;
}

bool PackCache::lock() {
  std::error_code error;
  fs::create_directories(options_.folder, error);
  lock_ = ::open((path_ + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) {
    warn(fmt::format("the cache folder {} cannot be written: {}", options_.folder, std::strerror(errno)));
    return false;
  }
  while (::flock(lock_, LOCK_EX) != 0)
    if (errno != EINTR) {
      warn(fmt::format("{}.lock cannot be locked: {}", path_, std::strerror(errno)));
      return false;
    }
  return true;
}

std::span<const std::byte> PackCache::open(Team& team) {
  if (path_.empty()) return {};
  // The second look is for what another process made while this one waited.
  if (map(team) || (lock() && map(team))) return {mapped_ + kPage, bytes_};
  return {};
}

// Of a start that was killed while it wrote. Nobody writes now: this process holds the lock.
void PackCache::remove_leftovers() const {
  const std::string begin = fs::path(path_).filename().string() + ".";
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(options_.folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(begin) && name.ends_with(".tmp")) fs::remove(entry.path(), error);
  }
}

void PackCache::make_room() const {
  std::vector<PackCacheEntry> entries = list(options_.folder);
  size_t sum = 0;
  for (const PackCacheEntry& e : entries) sum += e.bytes;
  for (; sum > options_.limit && !entries.empty(); entries.pop_back()) {
    if (entries.back().file == path_) continue;
    std::error_code error;
    fs::remove(entries.back().file, error);
    fs::remove(entries.back().file + ".lock", error);
    sum -= entries.back().bytes;
  }
}

void PackCache::store(std::span<const std::byte> data, Team& team) {
  if (path_.empty()) return;
  WEFT_CHECK(data.size() == bytes_);
  remove_leftovers();
  const size_t whole = kPage + bytes_;
  if (whole > options_.limit)
    return warn(
        fmt::format("{} bytes of packed weights are over the cache's limit of {}", whole, options_.limit));
  struct statvfs disk = {};
  if (::statvfs(options_.folder.c_str(), &disk) == 0 && disk.f_bavail * disk.f_frsize < whole)
    return warn(fmt::format("{} has {} bytes left, the packed weights need {}", options_.folder,
                            disk.f_bavail * disk.f_frsize, whole));
  const std::string temporary = fmt::format("{}.{}.tmp", path_, ::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return warn(fmt::format("{} cannot be created: {}", temporary, std::strerror(errno)));
  const Header header = make_header(key_, data, team);
  std::vector<std::byte> front(kPage);
  std::memcpy(front.data(), &header, sizeof header);
  const BlockFileSizeSignal block;
  bool good = write_all(fd, front.data(), front.size()) && write_all(fd, data.data(), data.size()) &&
              ::fsync(fd) == 0;
  const int reason = errno;
  good = ::close(fd) == 0 && good && ::rename(temporary.c_str(), path_.c_str()) == 0;
  if (!good) {
    const int why = reason ? reason : errno;
    ::unlink(temporary.c_str());
    return warn(fmt::format("{} could not be written: {}", path_, std::strerror(why)));
  }
  if (const int folder = ::open(options_.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
  make_room();
  ::flock(lock_, LOCK_UN);  // not only closed: a child of fork() would keep it
  ::close(lock_);
  lock_ = -1;
}

std::string PackCache::default_folder() {
  if (const char* set = std::getenv("XDG_CACHE_HOME"); set && *set) return std::string(set) + "/weft";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.cache/weft";
  return "";
}

std::vector<PackCacheEntry> PackCache::list(const std::string& folder) {
  std::vector<PackCacheEntry> out;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    struct stat info = {};
    constexpr size_t kTail = 1 + 16 + sizeof kSuffix - 1;  // -key.weft
    if (!name.ends_with(kSuffix) || name.size() <= kTail || ::stat(entry.path().c_str(), &info) != 0)
      continue;
    out.push_back({entry.path().string(), name.substr(0, name.size() - kTail),
                   static_cast<size_t>(info.st_size),
                   info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec});
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.used_ns > b.used_ns; });
  return out;
}

size_t PackCache::clear(const std::string& folder) {
  size_t freed = 0;
  std::error_code error;
  for (const PackCacheEntry& e : list(folder)) {
    if (!fs::remove(e.file, error) && error) fail("{} cannot be removed: {}", e.file, error.message());
    freed += e.bytes;
  }
  // Locks and what a killed start left. A start that is writing now loses its file and says so.
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.find(std::string(kSuffix) + ".") == name.npos) continue;
    std::error_code ignored;
    if (name.ends_with(".tmp")) freed += entry.file_size(ignored);
    if (name.ends_with(".tmp") || name.ends_with(".lock")) fs::remove(entry.path(), ignored);
  }
  return freed;
}

}  // namespace weft
