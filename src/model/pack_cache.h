// Packed weights on disk, so that a second start maps them instead of packing again.
//
// One file per key, written beside its name and renamed when it is complete and on disk. Nothing in it is
// trusted: magic, version, key, length and a checksum of every block must agree, or the file is made anew. A
// cache that cannot be read or written costs one warning and the time of packing, never a wrong weight. No
// error leaves this class.
//
// A new file is written by a thread of its own while the model already answers: gigabytes and their fsync
// took longer than packing them.
//
//   file   4096 bytes: magic, version, key, data bytes, bytes of a block, XXH3 of the blocks' XXH3, XXH3 of
//   these
//          data
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/team.h"

namespace weft {

struct PackCacheOptions {
  std::string folder;                            // "" = no cache
  size_t limit = size_t{64} << 30;               // bytes of all files; the least recently used go first
  size_t smallest = size_t{64} << 20;            // smaller weights are packed faster than they are looked up
  std::function<void(const std::string&)> warn;  // one line; from store()'s thread too
  std::function<void(const std::string&)> note;  // one line: why the end of the process takes a while
  bool wait = false;                             // store() returns when the file is there: for measurements
};

struct PackCacheEntry {
  std::string file, model;
  size_t bytes;
  int64_t used_ns;  // since the epoch
};

class PackCache {
 public:
  // model: for the file's name, so that a person recognises it.
  PackCache(PackCacheOptions options, std::string model, uint64_t key, size_t bytes);
  ~PackCache();  // finish()
  PackCache(const PackCache&) = delete;
  PackCache& operator=(const PackCache&) = delete;

  // The bytes, mapped read-only for the life of this object; empty when there is no valid file. Then this
  // process holds the key's lock until the file is written or the end: another start of the same model waits
  // for what this one makes.
  std::span<const std::byte> open(Team& team);
  // Once. Begins to write the file; the data must stay as they are until finish() or the end of this object.
  void store(std::span<const std::byte> data);
  // Waits for the file, or drops it when an error is ending the process.
  void finish();

  static std::string default_folder();  // $XDG_CACHE_HOME/weft, else ~/.cache/weft; "" without a home
  static std::vector<PackCacheEntry> list(const std::string& folder);  // newest use first
  static size_t clear(const std::string& folder);  // bytes freed. error: what cannot be removed

 private:
  bool map(Team& team);
  void unmap();
  bool lock();
  void remove_leftovers() const;
  void make_room() const;
  void write(int fd, const std::string& temporary, std::span<const std::byte> data);
  bool write_file(int fd, std::span<const std::byte> data);
  void unlock();
  void warn(const std::string& line);

  PackCacheOptions options_;
  std::string path_;
  uint64_t key_;
  size_t bytes_;
  int lock_ = -1;
  const std::byte* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::thread writer_;
  std::atomic<size_t> written_{0};
  std::atomic<bool> drop_{false}, done_{false};
};

}  // namespace weft
