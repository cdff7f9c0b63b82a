// The engine: a model, its caches and its tokenizer; requests in, tokens out.
//
// One thread drives it by step(). A request that fails (a NaN in its logits) fails alone.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/stop.h"
#include "model/model.h"
#include "text/chat.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

namespace weft {

struct EngineOptions {
  std::string model;        // folder
  std::string isa;          // "" = best
  int threads = 0;          // 0 = default_threads()
  bool pin = false;         // each thread stays on a CPU of its own
  int context = 0;          // tokens of one sequence; 0 = min(the model's, kDefaultContext)
  int chunk = 512;          // tokens of one step
  MlaForm mla = MlaForm::automatic;
  ExecMode exec = ExecMode::super;
  DsaMode dsa = DsaMode::sparse;
  Tier tier;
  IndexFormat index_cache = IndexFormat::operand;
  LatentFormat latent_cache = LatentFormat::operand;
  bool trace = false;       // keep what ran when, for save_trace()
  PackCacheOptions cache;   // of packed weights; none without a folder
  int sequences = 1;        // at once
  int checkpoints = 2;      // saved states, for conversations that go back
  bool check_memory = true; // refuse what does not fit, before loading
  bool need_tokenizer = false;  // refuse a folder without one, before loading
  std::function<void(const MemoryPlan&)> on_plan;  // before any weight is read
  std::function<void(const LoadProgress&)> on_load;
};

inline constexpr int kDefaultContext = 8192;

class Engine {
 public:
  // error: all that Model says; or a plan larger than the memory available, with both numbers.
  explicit Engine(const EngineOptions& options);
  ~Engine();

  // Text side. error: the folder has no tokenizer (a model without one still runs from token ids).
  const Tokenizer& tokenizer() const;
  const ChatFormat& chat() const;
  std::vector<int32_t> encode(std::string_view text, Tokenizer::Specials specials) const;
  std::vector<int32_t> encode(const std::vector<ChatSegment>& segments) const;

  // error (usage): empty prompt, ids outside the vocabulary, prompt and max_tokens beyond the context, sampling values
  // out of range. Nothing has changed then.
  using Id = int64_t;
  Id submit(Request request);
  void cancel(Id id);
  void save_trace(const std::string& path) const;  // Chrome trace JSON; error: the file cannot be written
  // One step; false when there is nothing to do. The results of finished requests wait in take().
  bool step();
  std::optional<Result> take(Id id);
  Result run(Request request);  // submit, step until done, take

  Session new_session() { return {caches_->create(), {}}; }

  Model& model() { return *model_; }
  const Model& model() const { return *model_; }
  Team& team() { return *team_; }
  Caches& caches() { return *caches_; }
  const ModelConfig& config() const { return model_->config(); }
  int context() const { return limits_.max_tokens; }
  const MemoryPlan& memory() const { return memory_; }

 private:
  struct Running;
  void admit();
  void begin(Running& r);
  void take_token(Running& r, const SampleRow& row, int batch_row);
  std::string text_of(Running& r, int32_t token);
  void emit(Running& r, const std::string& text, int32_t token);
  void finish(Running& r, Finish reason, const std::string& error = "");

  std::unique_ptr<Tokenizer> tokenizer_;
  std::string tokenizer_error_;
  std::unique_ptr<Team> team_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Trace> trace_;
  CacheLimits limits_;
  MemoryPlan memory_;
  std::unique_ptr<Caches> caches_;
  std::unique_ptr<Batch> batch_;
  std::unique_ptr<Sampler> sampler_;
  std::vector<int32_t> end_tokens_;
  std::deque<std::unique_ptr<Running>> waiting_;
  std::list<std::unique_ptr<Running>> running_;
  std::vector<std::pair<Id, Result>> done_;
  Id next_id_ = 1;
};

BuildOptions build_options(const EngineOptions& options);  // max_logits as BuildOptions has it
// error: the plan is larger than the memory available; with both numbers and what could be changed.
void check_memory(const Model& model, const MemoryPlan& plan);
// Pages for `sequences` full contexts. error (usage): a context beyond the model's.
CacheLimits cache_limits(const ModelConfig& config, int context, int sequences, int checkpoints);

}  // namespace weft
