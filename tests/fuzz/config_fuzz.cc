// Any bytes as config.json: a clean Error, or a configuration whose dimensions are what their readers
// promise.
#include <algorithm>

#include "base/check.h"
#include "base/json.h"
#include "model/arch.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  try {
    const weft::Json json = weft::parse_json({reinterpret_cast<const char*>(bytes), size}, "config.json");
    const weft::Arch& arch = weft::find_arch(json, "config.json", nullptr);
    const weft::ModelConfig config = arch.read(json, "config.json", nullptr);
    WEFT_CHECK(config.vocab > 0 && config.hidden > 0 && config.num_layers() > 0);
  } catch (const weft::Error& error) {
    const std::string_view message = error.what();
    WEFT_CHECK(message.size() < 4000 && std::count(message.begin(), message.end(), '\n') == 0);
    WEFT_CHECK(weft::printable(message, message.size() + 1) == message);
  }
  return 0;
}
