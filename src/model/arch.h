// A model family: how its config.json is read, how its graph is built, how its chat looks.
// arch/<family>.cc defines one and registers it; nothing else in the tree names a family.
#pragma once

#include <span>
#include <string>

#include "base/json.h"
#include "model/config.h"

namespace weft {

class Builder;
class Checkpoint;

struct Arch {
  const char* family;
  // True when config.json (top level `json`) belongs to this family. `checkpoint` may be null (config only); K3.1 is
  // told from K3 by dsa_config or by indexer tensors (kimi_k31.md 2.3). At most one family may say yes.
  bool (*matches)(const Json& json, const Checkpoint* checkpoint);
  // Throws Error naming key, found and expected. `where` is the path of config.json.
  ModelConfig (*read)(const Json& json, const std::string& where, const Checkpoint* checkpoint);
  void (*build)(Builder&, const ModelConfig&);
  const char* chat;  // name of the chat format in text/chat.h
};

std::span<const Arch* const> all_archs();
// error: unknown architecture, listing what is known
const Arch& find_arch(const Json& json, const std::string& where, const Checkpoint* checkpoint);

struct ArchRegistration {
  explicit ArchRegistration(const Arch& arch);
};

// Each arch/<file>.cc says WEFT_ARCH_FILE(<file>) once. The linker takes from a static library only what is asked
// for by name, and nothing asks for a registration: cmake/arch_files.cmake asks for this symbol, for every file there.
#define WEFT_ARCH_FILE(file)                \
  extern "C" {                              \
  extern const char weft_arch_file_##file;  \
  const char weft_arch_file_##file = 0;     \
  }

}  // namespace weft
