#include "model/pack_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <system_error>

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
std::vector<uint64_t> block_sums(std::span<const std::byte> data, Team& team) {
  std::vector<uint64_t> sums((data.size() + kBlock - 1) / kBlock);
  team.run(static_cast<int>(sums.size()), [&](int i, int) {
    const size_t begin = static_cast<size_t>(i) * kBlock;
    sums[i] = XXH3_64bits(data.data() + begin, std::min(kBlock, data.size() - begin));
  });
  return sums;
}

Header make_header(uint64_t key, size_t bytes, const std::vector<uint64_t>& sums) {
  Header h{};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.version = kVersion, h.key = key, h.bytes = bytes, h.block = kBlock;
  h.data_sum = XXH3_64bits(sums.data(), sums.size() * sizeof(uint64_t));
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

// For a thread that starts meanwhile: signals belong to the application's threads, and beyond a file-size
// limit write() raises SIGXFSZ in the thread that writes, which would end the program; blocked, it returns
// EFBIG.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// The team computes meanwhile. A tenth of a core feeds the disk; but that much it must get even beside busy
// threads, as another start waits for the file: so not SCHED_IDLE.
constexpr int kWriterNice = 10;

// Sends [begin, end) to the disk, now; with `wait` it is there on return. Without it gigabytes of unwritten
// pages pile up for one fsync that nothing can interrupt.
bool flush(int fd, size_t begin, size_t end, bool wait) {
  const unsigned flags =
      SYNC_FILE_RANGE_WRITE | (wait ? SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER : 0u);
  if (::sync_file_range(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin), flags) == 0)
    return true;
  return errno != EIO && errno != ENOSPC && errno != EDQUOT;  // else the file system knows no such call
}

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
  finish();
  unmap();
  unlock();
}

void PackCache::unlock() {
  if (lock_ < 0) return;
  ::flock(lock_, LOCK_UN);  // not only closed: a child of fork() would keep it
  ::close(lock_);
  lock_ = -1;
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
  const Header expected = make_header(key_, bytes_, block_sums({mapped_ + kPage, bytes_}, team));
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

void PackCache::store(std::span<const std::byte> data) {
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
  try {
    const BlockSignals block;
    writer_ = std::thread(&PackCache::write, this, fd, temporary, data);
  } catch (const std::system_error&) {  // no thread to be had: then here
    return write(fd, temporary, data);
  }
  if (options_.wait) finish();
}

// At the end of a run the rest is written, not dropped: a user of short prompts would pack at every start,
// and what is waited for now was waited for before the first token. Whoever cannot wait interrupts it; that
// leaves what kill -9 leaves, a file without its name that the next start removes. An error is told at once
// instead.
void PackCache::finish() {
  if (!writer_.joinable()) return;
  if (std::uncaught_exceptions() > 0) {
    drop_ = true;
  } else if (!done_ && !options_.wait && options_.note) {
    options_.note(
        fmt::format("writing packed weights for the next start, {} of {} MB (--no-cache goes without)",
                    written_ >> 20, bytes_ >> 20));
  }
  writer_.join();
}

// The life of writer_.
void PackCache::write(int fd, const std::string& temporary, std::span<const std::byte> data) {
  if (!options_.wait) ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kWriterNice);
  bool good = write_file(fd, data);
  int reason = good ? 0 : errno;
  if (::close(fd) != 0 && good) good = false, reason = errno;
  if (good && ::rename(temporary.c_str(), path_.c_str()) != 0) good = false, reason = errno;
  if (!good) {
    ::unlink(temporary.c_str());
    if (!drop_) warn(fmt::format("{} could not be written: {}", path_, std::strerror(reason)));
  } else {
    if (const int folder = ::open(options_.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); folder >= 0) {
      ::fsync(folder);
      ::close(folder);
    }
    make_room();
  }
  unlock();
  done_ = true;
}

// The header comes last, with the sums of what was written. False with errno, or when the file is dropped.
bool PackCache::write_file(int fd, std::span<const std::byte> data) {
  std::vector<std::byte> front(kPage);
  std::vector<uint64_t> sums;
  if (!write_all(fd, front.data(), front.size())) return false;
  for (size_t at = 0; at < data.size(); at += kBlock) {
    if (drop_) return false;
    const size_t n = std::min(kBlock, data.size() - at);
    sums.push_back(XXH3_64bits(data.data() + at, n));
    if (!write_all(fd, data.data() + at, n) || !flush(fd, at, kPage + at + n, false)) return false;
    constexpr size_t kBehind = 4 * kBlock;  // what may be on its way to the disk
    if (at >= kBehind && !flush(fd, at - kBehind, at - kBehind + kBlock, true)) return false;
    written_ = at + n;
  }
  const Header header = make_header(key_, data.size(), sums);
  std::memcpy(front.data(), &header, sizeof header);
  return ::lseek(fd, 0, SEEK_SET) == 0 && write_all(fd, front.data(), front.size()) && ::fsync(fd) == 0;
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
