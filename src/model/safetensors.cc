#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/json.h"

namespace weft {
namespace {

// The limit of the format's reference implementation; a larger length is never a header.
constexpr uint64_t kMaxHeader = 100'000'000;

struct DtypeRow {
  StoredDtype dtype;
  const char* name;
  size_t size;
};
constexpr DtypeRow kDtypes[] = {
    {StoredDtype::bf16, "BF16", 2},       {StoredDtype::f16, "F16", 2},
    {StoredDtype::f32, "F32", 4},         {StoredDtype::f64, "F64", 8},
    {StoredDtype::i64, "I64", 8},         {StoredDtype::i32, "I32", 4},
    {StoredDtype::i16, "I16", 2},         {StoredDtype::i8, "I8", 1},
    {StoredDtype::u8, "U8", 1},           {StoredDtype::u16, "U16", 2},
    {StoredDtype::u32, "U32", 4},         {StoredDtype::u64, "U64", 8},
    {StoredDtype::boolean, "BOOL", 1},    {StoredDtype::f8_e4m3, "F8_E4M3", 1},
    {StoredDtype::f8_e5m2, "F8_E5M2", 1}, {StoredDtype::f8_e8m0, "F8_E8M0", 1},
};

const DtypeRow& row(StoredDtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)];
}

// shape x size, nullopt when it does not fit. A zero dimension makes it 0 whatever the others are.
std::optional<size_t> checked_bytes(std::span<const int64_t> shape, size_t size) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  size_t bytes = size;
  for (int64_t dim : shape)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(dim), &bytes)) return std::nullopt;
  return bytes;
}

// An integer as the format writes it: digits only. 3.0 and -0 are fine in a config, in a header they mean
// that something else than a safetensors writer made the file.
std::optional<int64_t> plain_integer(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(number);
}

TensorInfo parse_entry(const std::string& name, const Json& entry, std::string_view path,
                       std::span<const std::byte> data) {
  const std::string where = fmt::format("{}: tensor {}", printable(path), printable(name));
  if (!entry.is_object()) fail("{}: its header entry is not an object", where);
  TensorInfo tensor;
  tensor.name = name;
  tensor.file = path;

  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) fail("{}: no dtype in the header", where);
  const std::string& dtype_text = dtype->get_ref<const std::string&>();
  const std::optional<StoredDtype> known = stored_dtype(dtype_text);
  if (!known) fail("{}: unknown dtype \"{}\"", where, printable(dtype_text, 40));
  tensor.dtype = *known;

  const auto shape = entry.find("shape");
  if (shape == entry.end() || !shape->is_array()) fail("{}: no shape array in the header", where);
  tensor.shape.reserve(shape->size());
  for (const Json& dim : *shape) {
    const std::optional<int64_t> value = plain_integer(dim);
    if (!value) fail("{}: dimension {} of its shape is not an integer >= 0", where, tensor.shape.size());
    tensor.shape.push_back(*value);
  }

  const auto offsets = entry.find("data_offsets");
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2)
    fail("{}: data_offsets is not a pair", where);
  const std::optional<int64_t> begin = plain_integer((*offsets)[0]), end = plain_integer((*offsets)[1]);
  if (!begin || !end) fail("{}: data_offsets are not integers >= 0", where);
  if (*begin > *end) fail("{}: data_offsets [{}, {}] are reversed", where, *begin, *end);

  const std::optional<size_t> bytes = checked_bytes(tensor.shape, stored_size(tensor.dtype));
  if (!bytes) fail("{}: shape {} does not fit into memory", where, shape_text(tensor.shape));
  tensor.bytes = static_cast<size_t>(*end - *begin);
  if (tensor.bytes != *bytes) {
    fail("{}: {} {} takes {} bytes, data_offsets [{}, {}] hold {}", where, dtype_text,
         shape_text(tensor.shape), *bytes, *begin, *end, tensor.bytes);
  }
  if (static_cast<uint64_t>(*end) > data.size()) {
    fail("{}: its data ends at byte {} of {}: the file is cut short, download it again", where, *end,
         data.size());
  }
  tensor.data = data.data() + *begin;
  return tensor;
}

// For what is surely no safetensors file, a message that says what it is instead.
void refuse_foreign(std::string_view head, size_t size, std::string_view path) {
  const std::string file = printable(path);
  if (size == 0) fail("{} is empty, not a safetensors file: download it again", file);
  if (const std::string wrong = wrong_content(head); !wrong.empty()) fail("{} {}", file, wrong);
  if (head.starts_with("GGUF")) fail("{} is a GGUF file, not a safetensors file", file);
  if (head.starts_with("PK\x03\x04"))
    fail("{} is a zip archive (PyTorch weights?), not a safetensors file", file);
  if (head.find_first_not_of('\0') == head.npos) {
    fail("{} starts with zeros, not with a safetensors header: an unfinished download?", file);
  }
  if (size < 8) fail("{}: {} bytes are too few for a safetensors file", file, size);
}

}  // namespace

size_t stored_size(StoredDtype dtype) {
  return row(dtype).size;
}
const char* stored_name(StoredDtype dtype) {
  return row(dtype).name;
}

std::optional<StoredDtype> stored_dtype(std::string_view name) {
  for (const DtypeRow& candidate : kDtypes)
    if (name == candidate.name) return candidate.dtype;
  return std::nullopt;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i == 8) return text + fmt::format(", ... {} dimensions]", shape.size());
    text += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  }
  return text + "]";
}

std::vector<TensorInfo> parse_safetensors(std::span<const std::byte> file, std::string_view path) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  refuse_foreign(text.substr(0, 512), file.size(), path);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i)
    length = length << 8 | static_cast<unsigned char>(text[static_cast<size_t>(i)]);
  const std::string where = printable(path);
  if (length > file.size() - 8) {  // not 8 + length > size, which wraps near 2^64
    fail("{}: the header length is {}, the file has {} bytes: cut short or not a safetensors file", where,
         length, file.size());
  }
  if (length < 2) fail("{}: a header of {} bytes, not a safetensors file", where, length);
  if (length > kMaxHeader)
    fail("{}: a header of {} bytes is over the limit of {}", where, length, kMaxHeader);
  const Json header = parse_json(text.substr(8, length), fmt::format("{}: safetensors header", where));
  if (!header.is_object()) fail("{}: the safetensors header is not a JSON object", where);

  std::vector<TensorInfo> tensors;
  tensors.reserve(header.size());
  const std::span<const std::byte> data = file.subspan(8 + length);
  for (const auto& [name, entry] : header.items())
    if (name != "__metadata__") tensors.push_back(parse_entry(name, entry, path, data));
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) { return a.data < b.data; });

  // Empty tensors hold no byte that could be shared, wherever they lie.
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.bytes == 0) continue;
    if (previous != nullptr && tensor.data < previous->data + previous->bytes) {
      fail("{}: tensors {} and {} overlap", where, printable(previous->name), printable(tensor.name));
    }
    previous = &tensor;
  }
  return tensors;
}

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: a FIFO under this name must be refused, not waited for.
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail("{}: cannot open: {}", printable(path_), std::strerror(errno));
  struct stat info = {};
  const bool known = ::fstat(fd, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail("{} is not a regular file", printable(path_));
  }
  size_ = static_cast<size_t>(info.st_size);
  device_ = info.st_dev;
  inode_ = info.st_ino;
  changed_ns_ = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec;
  void* mapped = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
  const int reason = errno;
  ::close(fd);
  if (mapped == MAP_FAILED)
    fail("{}: cannot map {} bytes: {}", printable(path_), size_, std::strerror(reason));
  data_ = static_cast<const std::byte*>(mapped);
  try {
    tensors_ = parse_safetensors({data_, size_}, path_);
  } catch (...) {
    if (mapped != nullptr) ::munmap(mapped, size_);
    throw;
  }
  uint64_t length = 0;
  std::memcpy(&length, data_, 8);
  identity_ = XXH3_64bits(data_, 8 + length);
  const uint64_t stamp[] = {identity_, size_, static_cast<uint64_t>(changed_ns_)};
  identity_ = XXH3_64bits(stamp, sizeof stamp);
}

SafetensorsFile::~SafetensorsFile() {
  ::munmap(const_cast<std::byte*>(data_), size_);
}

void SafetensorsFile::check_unchanged() const {
  struct stat now = {};
  if (::stat(path_.c_str(), &now) != 0 || now.st_dev != device_ || now.st_ino != inode_) return;
  if (static_cast<size_t>(now.st_size) != size_) {
    fail("{} was {} bytes when loading began and is {} now: something is still writing it", printable(path_),
         size_, now.st_size);
  }
  if (now.st_mtim.tv_sec * 1'000'000'000 + now.st_mtim.tv_nsec != changed_ns_)
    fail("{} was rewritten while it was being loaded: start again when it is complete", printable(path_));
}

void release_pages(const TensorInfo& tensor) {
  const uintptr_t page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(tensor.data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(tensor.data) + tensor.bytes) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

SafetensorsWriter::SafetensorsWriter(std::string path)
    : path_(std::move(path)), temporary_(fmt::format("{}.{}.tmp", path_, ::getpid())) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void SafetensorsWriter::system_error(const char* action) {
  const int reason = errno;
  fail("{}: cannot {}: {} ({} of {} bytes of tensors written)", printable(path_), action,
       std::strerror(reason), written_bytes_, declared_bytes_);
}

void SafetensorsWriter::declare(const std::string& name, StoredDtype dtype,
                                const std::vector<int64_t>& shape) {
  WEFT_CHECK(fd_ < 0, "declare({}) after write()", name);
  TensorInfo tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = shape;
  const bool negative = std::any_of(shape.begin(), shape.end(), [](int64_t dim) { return dim < 0; });
  const std::optional<size_t> bytes = negative ? std::nullopt : checked_bytes(shape, stored_size(dtype));
  if (!bytes || __builtin_add_overflow(declared_bytes_, *bytes, &declared_bytes_))
    fail("{}: tensor {}: impossible shape {}", printable(path_), printable(name), shape_text(shape));
  tensor.bytes = *bytes;
  declared_.push_back(std::move(tensor));
}

void SafetensorsWriter::start() {
  // Other readers want "format": "pt" before they take a file for weights.
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  size_t offset = 0;
  for (const TensorInfo& tensor : declared_) {
    WEFT_CHECK(!header.contains(tensor.name), "{} is declared twice", tensor.name);
    header[tensor.name] = {{"dtype", stored_name(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) system_error("create it");
  const uint64_t length = text.size();
  put(reinterpret_cast<const std::byte*>(&length), sizeof length);  // x86 only: little-endian already
  put(reinterpret_cast<const std::byte*>(text.data()), text.size());
}

void SafetensorsWriter::put(const std::byte* data, size_t bytes) {
  while (bytes != 0) {
    const ssize_t done = ::write(fd_, data, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) system_error("write");
    data += done;
    bytes -= static_cast<size_t>(done);
  }
}

void SafetensorsWriter::flush() {
  put(pending_.data(), pending_.size());
  pending_.clear();
}

void SafetensorsWriter::write(const void* data, size_t bytes) {
  constexpr size_t kPiece = 1 << 20;  // callers may write element by element
  WEFT_CHECK(bytes <= declared_bytes_ - written_bytes_, "more bytes than declared for {}", path_);
  if (fd_ < 0) start();
  const std::byte* source = static_cast<const std::byte*>(data);
  if (pending_.size() + bytes > kPiece) flush();
  if (bytes >= kPiece) {
    put(source, bytes);
  } else {
    pending_.insert(pending_.end(), source, source + bytes);
  }
  written_bytes_ += bytes;
}

void SafetensorsWriter::finish() {
  if (fd_ < 0) start();
  WEFT_CHECK(written_bytes_ == declared_bytes_, "{} of {} bytes written to {}", written_bytes_,
             declared_bytes_, path_);
  flush();
  if (::fsync(fd_) != 0) system_error("flush it to disk");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) system_error("rename it into place");
  ::close(fd_);
  fd_ = -1;
  // The rename itself survives a power cut only once the folder is flushed; not every file system can.
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  if (const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); fd >= 0) {
    ::fsync(fd);
    ::close(fd);
  }
}

}  // namespace weft
