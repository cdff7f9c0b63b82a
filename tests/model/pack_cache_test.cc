// The cache of packed weights: right bytes or none, whatever lies in its folder.
#include "model/pack_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBytes = (size_t{40} << 20) + 777;  // three blocks, the last one short

class Cache : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("weft-pack-cache-" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    std::mt19937_64 random(5);
    data_.resize(kBytes);
    for (size_t i = 0; i + 8 <= kBytes; i += 8) {
      const uint64_t x = random();
      std::memcpy(data_.data() + i, &x, 8);
    }
  }
  void TearDown() override {
    fs::permissions(folder_, fs::perms::owner_all, fs::perm_options::add, ignored_);
    fs::remove_all(folder_);
  }
  PackCacheOptions options() {
    PackCacheOptions o;
    o.folder = folder_.string();
    o.smallest = 0;
    o.warn = [this](const std::string& line) { warnings_.push_back(line); };
    return o;
  }
  // What a start does. Returns whether it was served from the cache; the bytes must be right then.
  bool start(uint64_t key = 1, PackCacheOptions o = {}) {
    if (o.folder.empty()) o = options();
    PackCache cache(o, "model", key, kBytes);
    const auto got = cache.open(team_);
    if (got.empty()) {
      cache.store(data_);
      return false;
    }
    EXPECT_TRUE(got.size() == kBytes && std::equal(got.begin(), got.end(), data_.begin()));
    return true;
  }
  std::string only_file() const {
    const auto files = PackCache::list(folder_.string());
    EXPECT_EQ(files.size(), 1u);
    return files.empty() ? "" : files[0].file;
  }
  size_t leftovers() const {
    size_t n = 0;
    for (const auto& e : fs::directory_iterator(folder_, ignored_)) n += e.path().extension() == ".tmp";
    return n;
  }

  Team team_{2};
  fs::path folder_;
  std::vector<std::byte> data_;
  std::vector<std::string> warnings_;
  mutable std::error_code ignored_;
};

TEST_F(Cache, SecondStartIsServed) {
  EXPECT_FALSE(start());
  EXPECT_TRUE(start());
  EXPECT_FALSE(start(2));  // another key has its own file
  EXPECT_TRUE(start());
  EXPECT_TRUE(warnings_.empty());
  EXPECT_EQ(PackCache::list(folder_.string()).size(), 2u);
  EXPECT_EQ(PackCache::list(folder_.string())[0].model, "model");
  EXPECT_GT(PackCache::clear(folder_.string()), 2 * kBytes);
  EXPECT_TRUE(fs::is_empty(folder_));
}

// Any byte of the header or the data; cut short; grown; of another version: made anew, silently.
TEST_F(Cache, BrokenFilesAreMadeAnew) {
  start();
  const size_t whole = fs::file_size(only_file());
  std::mt19937_64 random(9);
  std::vector<size_t> places = {0, 8, 16, 24, 32, 40, 48, whole - 1, whole - kBytes};
  for (int i = 0; i < 20; ++i) places.push_back(whole - kBytes + random() % kBytes);
  for (const size_t at : places) {
    {
      std::fstream file(only_file(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(static_cast<std::streamoff>(at));
      const char was = static_cast<char>(file.get());
      file.seekp(static_cast<std::streamoff>(at));
      file.put(static_cast<char>(was ^ (1 << (at % 8))));
    }
    EXPECT_FALSE(start()) << "byte " << at;
    EXPECT_TRUE(start()) << "byte " << at;
  }
  for (const size_t size : {size_t{0}, size_t{100}, size_t{4096}, whole - 1, whole + 1}) {
    fs::resize_file(only_file(), size);
    EXPECT_FALSE(start()) << size << " bytes";
    EXPECT_TRUE(start()) << size << " bytes";
  }
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(Cache, FolderThatCannotBeWrittenCostsOneWarning) {
  std::ofstream(folder_) << "a file where the folder should be";
  EXPECT_FALSE(start());
  EXPECT_EQ(warnings_.size(), 1u);
  fs::remove(folder_);
  // Root may write anywhere: the refusal comes from a folder that cannot exist.
  PackCacheOptions o = options();
  o.folder = "/proc/weft";
  EXPECT_FALSE(start(1, o));
  EXPECT_EQ(warnings_.size(), 2u);
}

// A file-size limit stands in for a full disk: write() fails in the middle of the data (and SIGXFSZ must not
// kill).
TEST_F(Cache, AFileThatCannotBeFinishedIsNoFile) {
  for (const rlim_t limit : {rlim_t{1000}, rlim_t{5000}, rlim_t{20 << 20}}) {
    const pid_t child = ::fork();
    if (child == 0) {
      const rlimit to{limit, limit};
      ::setrlimit(RLIMIT_FSIZE, &to);
      Team alone(1);
      int said = 0;
      PackCacheOptions o = options();
      o.warn = [&](const std::string&) { ++said; };
      PackCache cache(o, "model", 1, kBytes);
      const bool served = !cache.open(alone).empty();
      cache.store(data_);
      cache.finish();
      ::_exit(served ? 1 : said == 1 ? 0 : 2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_TRUE(PackCache::list(folder_.string()).empty());
    EXPECT_EQ(leftovers(), 0u);
  }
  EXPECT_FALSE(start());  // the limit is gone: built
  EXPECT_TRUE(start());
}

TEST_F(Cache, KilledWritersLeaveNothingThatCounts) {
  std::mt19937 random(3);
  for (int i = 0; i < 12; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      Team alone(1);
      PackCache cache(options(), "model", 1, kBytes);
      if (cache.open(alone).empty()) cache.store(data_);
      cache.finish();
      ::_exit(0);
    }
    ::usleep(random() % 30000);
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    start();
    EXPECT_TRUE(start());
    EXPECT_EQ(leftovers(), 0u);
    PackCache::clear(folder_.string());
  }
}

// store() returns before the file is there; the end waits for it and says so, unless an error is the end.
TEST_F(Cache, IsWrittenBesideTheWork) {
  std::vector<std::string> notes;
  PackCacheOptions o = options();
  o.note = [&](const std::string& line) { notes.push_back(line); };
  for (const bool fails : {true, false}) {
    bool beside = false;  // false, too, when the system takes this thread away for as long as the file takes
    for (int i = 0; i < 5 && !beside; ++i) {
      PackCache::clear(folder_.string());
      notes.clear();
      try {
        PackCache cache(o, "model", 1, kBytes);
        ASSERT_TRUE(cache.open(team_).empty());
        cache.store(data_);
        beside = PackCache::list(folder_.string()).empty();
        if (fails) throw 1;
      } catch (int) {
      }
    }
    EXPECT_TRUE(beside);
    EXPECT_EQ(PackCache::list(folder_.string()).size(), fails ? 0u : 1u);
    EXPECT_EQ(leftovers(), 0u);
    EXPECT_EQ(notes.size(), fails ? 0u : 1u);
  }
  EXPECT_TRUE(start());
  PackCache::clear(folder_.string());
  o.wait = true;
  PackCache cache(o, "model", 1, kBytes);
  ASSERT_TRUE(cache.open(team_).empty());
  cache.store(data_);
  EXPECT_EQ(PackCache::list(folder_.string()).size(), 1u);
  EXPECT_TRUE(start());  // the lock is free too
  EXPECT_EQ(notes.size(), 1u);
  EXPECT_TRUE(warnings_.empty());
}

// Two starts at once: the second waits for what the first makes.
TEST_F(Cache, TwoProcessesMakeOneFile) {
  PackCache first(options(), "model", 1, kBytes);
  ASSERT_TRUE(first.open(team_).empty());
  const pid_t child = ::fork();
  if (child == 0) {
    Team alone(1);
    PackCache second(options(), "model", 1, kBytes);
    const auto got = second.open(alone);
    ::_exit(got.size() == kBytes && std::equal(got.begin(), got.end(), data_.begin()) ? 0 : 1);
  }
  ::usleep(50000);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WNOHANG), 0);  // it waits
  first.store(data_);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Cache, TheLeastRecentlyUsedGoFirst) {
  PackCacheOptions o = options();
  o.limit = 2 * kBytes + (1 << 20);
  EXPECT_FALSE(start(1, o));
  ::usleep(20000);
  EXPECT_FALSE(start(2, o));
  ::usleep(20000);
  EXPECT_TRUE(start(1, o));
  ::usleep(20000);
  EXPECT_FALSE(start(3, o));  // 2 goes
  EXPECT_TRUE(start(1, o));
  EXPECT_TRUE(start(3, o));
  EXPECT_EQ(PackCache::list(folder_.string()).size(), 2u);
  o.limit = kBytes / 2;
  EXPECT_FALSE(start(4, o));
  EXPECT_EQ(warnings_.size(), 1u);
  o.smallest = kBytes + 1;  // not worth a file
  EXPECT_FALSE(start(5, o));
  EXPECT_EQ(warnings_.size(), 1u);
}

}  // namespace
}  // namespace weft
