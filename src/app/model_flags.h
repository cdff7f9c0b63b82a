// What the commands that generate text share: loading with progress, sampling flags, prompts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/cli.h"
#include "app/terminal.h"
#include "engine/direct.h"

namespace weft {

// Loads the model; says on stderr what it is, what memory it takes, how many threads run it and why, and how
// far the loading is. Ctrl-C meanwhile ends with ExitCode 130. error: all that Engine says; with
// `need_tokenizer` also a folder without one.
std::unique_ptr<Engine> load_engine(const CommonFlags& flags, const Notes& notes, bool need_tokenizer);

std::unique_ptr<Engine> load_engine(const CommonFlags& flags, const Notes& notes, EngineOptions options);
// The same for a model without requests; max_logits and trace of `options` count.
std::unique_ptr<Direct> load_direct(const CommonFlags& flags, const Notes& notes, DirectOptions options);

// Text that a model continues starts with its BOS token if its tokenizer says so, as the tokenizer's own
// post-processor would do it.
bool wants_bos(const ModelConfig& config, const std::string& folder);

double monotonic_seconds();

// Absent: not given, so generation_config.json's value counts, or else temperature 1, top-p 0.95 (what Kimi's
// model cards recommend), no top-k.
struct SamplingFlags {
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k;
  double min_p = 0, repeat_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  int64_t seed = -1;  // -1: drawn
  std::vector<std::string> stop;
  bool ignore_eos = false;
  int max_tokens = -1;
};
void add_sampling_flags(CLI::App& sub, SamplingFlags& flags);
// error (usage): a value out of range, an empty stop string. Needs no model, so that nobody waits for the
// loading to hear of it.
void check_sampling_flags(const SamplingFlags& flags);
// Draws the seed if none was given. `says`: one line for the log, naming what came from
// generation_config.json.
SamplingParams sampling_params(const SamplingFlags& flags, const ModelConfig& config,
                               std::string* says = nullptr);

// The whole of a descriptor or of a file. error: the system's reason.
std::string read_all(int fd, const std::string& what);
std::string read_prompt_file(const std::string& path);

// "1 2 3", also with commas. error (usage): anything else, ids beyond 32 bits.
std::vector<int32_t> parse_ids(const std::string& text);

// "prompt 12 tokens, 38.7 tokens/s; ..." A rate that is not defined is left out.
std::string describe_stats(const RequestStats& stats);

}  // namespace weft
