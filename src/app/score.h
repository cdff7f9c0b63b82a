// Log-probabilities of a text under a model, window by window, and the file that keeps a run's whole
// distributions.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/direct.h"

namespace weft {

// Tokens [begin, end) are read from an empty state; those from `scored` on count, the others are their
// context.
struct Window {
  int begin, scored, end;
};
// Every token but the first counts exactly once; each but those of the first window has at least window -
// stride tokens before it. error (usage): a window below 2 tokens, a stride outside 1..window - 1.
std::vector<Window> sliding_windows(int tokens, int window, int stride);

// log softmax of one row: log_prob(i) = logits[i] - lse. error: NaN or +inf.
double log_sum_exp(std::span<const float> logits);

// Runs the windows. `row(i, target, logits)` is called once for every token that counts, on the threads of
// the team at once: logits are those that predict tokens[target], i counts from 0 in order. `rows_done`
// follows on the calling thread after each step; `progress` gets tokens read of all to read. error: NaN in
// the logits, with its place.
struct ScoreHooks {
  std::function<void(int rows)> rows_about;  // before the rows of a step
  std::function<void(int i, int target, std::span<const float> logits)> row;
  std::function<void(int rows)> rows_done;  // so many so far
  std::function<void(int64_t read, int64_t total)> progress;
};
void score(Direct& direct, std::span<const int32_t> tokens, const std::vector<Window>& windows,
           const ScoreHooks& hooks);

// The distributions of a run, for KL divergences.
//
//   8 bytes   "WEFTLGT1"
//   u32       bytes of the header that follows
//   header    JSON: model, vocab, tokens, rows, window, stride, text_hash
//   i32       token ids [tokens]
//   rows      f32 top, f32 step, u16 code [vocab]:  log p = top - step * code
//
// Little-endian. A row spans the likeliest token to the least likely one, at most kLogitRange nats below it.
// The reader divides by the sum, so a code's rounding of at most step / 2 = 5e-4 nats enters a divergence by
// its square: about 1e-8, where bf16 of the same size would leave 1e-6. xxh64 of the decoded ids tells
// another tokenizer.
inline constexpr double kLogitRange = 64;

struct LogitHeader {
  std::string model;
  int vocab = 0, window = 0, stride = 0;
  std::string text_hash;
  std::vector<int32_t> tokens;
};

class LogitWriter {
 public:
  // error: the file cannot be written. It appears under its name when finish() returns.
  LogitWriter(const std::string& path, const LogitHeader& header, int rows);
  ~LogitWriter();
  LogitWriter(const LogitWriter&) = delete;
  LogitWriter& operator=(const LogitWriter&) = delete;
  static void encode(std::span<const float> logits, double lse, std::byte* row);  // row_bytes(vocab)
  void write(std::span<const std::byte> rows);
  void finish();

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
};

class LogitReader {
 public:
  // error: no such file, no file of this kind, one cut short.
  explicit LogitReader(const std::string& path);
  ~LogitReader();
  LogitReader(const LogitReader&) = delete;
  LogitReader& operator=(const LogitReader&) = delete;
  const LogitHeader& header() const { return header_; }
  int rows() const { return rows_; }
  void read(int rows, std::vector<std::byte>& out);  // the next ones

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
  LogitHeader header_;
  int rows_ = 0;
};

inline size_t logit_row_bytes(int vocab) {
  return 8 + 2 * static_cast<size_t>(vocab);
}

// What two distributions over one vocabulary have to do with each other.
struct Divergence {
  double kl = 0;             // KL(reference | other), nats
  double reference_nll = 0;  // of the target
  bool same_top = false;
};
Divergence compare_row(const std::byte* reference, std::span<const float> logits, double lse, int target);

std::string text_hash(std::string_view text);

}  // namespace weft
