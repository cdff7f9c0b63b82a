// Any bytes as a safetensors file: a clean Error, or tensors whose every byte can be read and belongs to one
// of them.
#include <memory>

#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  // An exact copy: reading one byte too far is then visible to the address sanitizer.
  const std::unique_ptr<std::byte[]> file(new std::byte[size]);
  if (size != 0) std::memcpy(file.get(), bytes, size);
  try {
    const std::vector<weft::TensorInfo> tensors = weft::parse_safetensors({file.get(), size}, "fuzz");
    size_t total = 0;
    for (const weft::TensorInfo& tensor : tensors) {
      std::vector<std::byte> copy(tensor.bytes);
      if (tensor.bytes != 0) std::memcpy(copy.data(), tensor.data, tensor.bytes);
      total += tensor.bytes;
      WEFT_CHECK(tensor.elements() * weft::stored_size(tensor.dtype) == tensor.bytes);
    }
    WEFT_CHECK(total <= size);
  } catch (const weft::Error& error) {
    WEFT_CHECK(std::string_view(error.what()).size() < 1000);
  }
  return 0;
}
