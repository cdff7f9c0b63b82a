// What a client asks for and what it gets, told token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/sequence.h"
#include "engine/sampling.h"

namespace weft {

enum class Finish : uint8_t { none, stop, length, cancelled, error };
const char* finish_name(Finish finish);

// Tokens already in the caches, kept between requests: a conversation. A request that continues one reuses the longest
// common beginning that its state can go back to.
struct Session {
  Sequence sequence;
  std::vector<int32_t> tokens;  // of sequence.position()
};

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int max_tokens = -1;             // -1: up to the context
  std::vector<std::string> stop;   // stop strings
  std::vector<int32_t> stop_ids;   // beside the model's own end tokens
  bool hide_special = true;        // special tokens do not show in the text
  Session* session = nullptr;      // must outlive the request

  // Called on the thread that runs Engine::step.
  std::function<void(int done, int total)> on_prefill;                // prompt tokens read
  std::function<void(int32_t token, const std::string& text)> on_token;  // text may be empty: half a code point, a possible stop
};

struct RequestStats {
  int prompt_tokens = 0, reused_tokens = 0, output_tokens = 0;
  double prefill_seconds = 0;   // submit to the first token
  double decode_seconds = 0;    // first to last token
  double prefill_rate() const { return prefill_seconds > 0 ? (prompt_tokens - reused_tokens) / prefill_seconds : 0; }
  double decode_rate() const { return decode_seconds > 0 ? (output_tokens - 1) / decode_seconds : 0; }
};

struct Result {
  Finish finish = Finish::none;
  std::string text, error;
  std::vector<int32_t> output;
  RequestStats stats;
};

}  // namespace weft
