// One safetensors file: read by mmap with a strict check of its header, written as a stream.
//
// Layout: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets: [begin, end]}},
// data; offsets count from the end of the header. Header lengths need not be multiples of 8, so tensor data
// may lie at any address: nothing here hands out a typed pointer, read_elements() copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace weft {

enum class StoredDtype : uint8_t {
  bf16,
  f16,
  f32,
  f64,
  i64,
  i32,
  i16,
  i8,
  u8,
  u16,
  u32,
  u64,
  boolean,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
};
size_t stored_size(StoredDtype dtype);       // bytes per element
const char* stored_name(StoredDtype dtype);  // as in the header: "BF16"
std::optional<StoredDtype> stored_dtype(std::string_view name);

struct TensorInfo {
  std::string name;
  StoredDtype dtype = StoredDtype::u8;
  std::vector<int64_t> shape;  // [] is a scalar; a dimension may be 0
  const std::byte* data = nullptr;
  size_t bytes = 0;       // == elements() * stored_size(dtype)
  std::string_view file;  // path of the file that holds it; lives as long as the file's owner

  size_t elements() const { return bytes / stored_size(dtype); }
};
std::string shape_text(std::span<const int64_t> shape);  // "[2, 3]"

// Copies elements [first, first + count) whatever their alignment. T must have the stored size.
template <class T>
void read_elements(const TensorInfo& tensor, size_t first, size_t count, T* out) {
  WEFT_CHECK(sizeof(T) == stored_size(tensor.dtype) && first <= tensor.elements() &&
                 count <= tensor.elements() - first,
             "{}", tensor.name);
  if (count != 0) std::memcpy(out, tensor.data + first * sizeof(T), count * sizeof(T));
}

// The tensors of a file whose bytes are `file`, in the order of their data. The infos keep views of both
// arguments. Gaps between tensors are accepted; overlap, anything outside the file and sizes other than shape
// x dtype are not. error: one line naming `path` and the tensor. Allocates no more than a small multiple of
// the header.
std::vector<TensorInfo> parse_safetensors(std::span<const std::byte> file, std::string_view path);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(
      std::string path);  // maps it and closes it: a checkpoint may have hundreds of shards
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  std::vector<TensorInfo> take_tensors() {
    return std::move(tensors_);
  }                                                // they stay valid, the file lists none after
  uint64_t identity() const { return identity_; }  // of size, time of change and header

  // error: the mapped file itself was cut or rewritten since it was opened (reading it further may raise
  // SIGBUS or give mixed weights). A file that was deleted or replaced by rename stays whole under the
  // mapping and passes.
  void check_unchanged() const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  uint64_t device_ = 0, inode_ = 0;
  int64_t changed_ns_ = 0;
  std::vector<TensorInfo> tensors_;
  uint64_t identity_ = 0;
};

// Gives the whole pages under a tensor back to the system; reading them again reads the file again.
void release_pages(const TensorInfo& tensor);

// declare() all tensors, then write() their bytes in that order and in pieces of any size, then finish(). The
// file appears under its name only when it is complete and on disk. error: names the path and the system's
// reason.
class SafetensorsWriter {
 public:
  explicit SafetensorsWriter(std::string path);
  ~SafetensorsWriter();  // without finish(): removes what was written
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void declare(const std::string& name, StoredDtype dtype, const std::vector<int64_t>& shape);
  void write(const void* data, size_t bytes);
  void finish();

 private:
  void start();
  void flush();
  void put(const std::byte* data, size_t bytes);
  [[noreturn]] void system_error(const char* action);

  std::string path_, temporary_;
  std::vector<TensorInfo> declared_;  // data unused
  size_t declared_bytes_ = 0, written_bytes_ = 0;
  std::vector<std::byte> pending_;
  int fd_ = -1;
};

}  // namespace weft
