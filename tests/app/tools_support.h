// Scratch folders, captured commands and small specs for the tests of the tools.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "app/cli.h"
#include "app/synth.h"
#include "base/json.h"

namespace weft::test {

namespace fs = std::filesystem;

// A fresh folder, gone at the end of the test.
class Scratch {
 public:
  Scratch() {
    static int count = 0;
    path_ = fs::temp_directory_path() / fmt::format("weft-tools-{}-{}", ::getpid(), count++);
    fs::create_directories(path_);
  }
  ~Scratch() { fs::remove_all(path_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

struct Ran {
  int code;
  std::string out, err;
  Json json() const { return parse_json(out, "stdout"); }
};

inline Ran weft_command(std::vector<std::string> words) {
  words.insert(words.begin(), "weft");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Ran ran;
  ran.code = run_cli(static_cast<int>(words.size()), argv.data());
  ran.out = ::testing::internal::GetCapturedStdout();
  ran.err = ::testing::internal::GetCapturedStderr();
  return ran;
}

inline std::string golden_folder(const std::string& name) {
  return std::string(WEFT_SOURCE_DIR) + "/tests/golden/" + name;
}

inline std::string file_bytes(const std::string& path) {
  return read_file(path);
}

inline void copy_folder(const std::string& from, const std::string& to) {
  fs::copy(from, to);
}

// Every kind of layer a family has, in a megabyte.
inline SynthSpec tiny_spec(const std::string& family) {
  SynthSpec s = synth_defaults(family);
  s.vocab = 160, s.hidden = 64, s.layers = 4, s.heads = 3, s.kv_lora = 32, s.nope = 16, s.v = 12;
  s.intermediate = 96, s.experts = 8, s.top_k = 3, s.expert_width = 32;
  if (s.kda_head_dim) s.kda_head_dim = 16, s.kda_heads = 2;
  if (s.rope) s.rope = 8;
  if (s.q_lora) s.q_lora = 32;
  if (s.index_heads) s.index_heads = 8, s.index_dim = 32, s.index_topk = 16;
  if (s.latent) s.latent = 32;
  if (s.groups > 1) s.groups = 4, s.top_groups = 2;
  if (s.family == "glm_moe_dsa") s.index_every = 3;
  return s;
}

}  // namespace weft::test
