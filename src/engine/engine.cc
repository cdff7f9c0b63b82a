#include "engine/engine.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/cpu.h"
#include "kernels/dispatch.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;
double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

std::string gib(size_t bytes) { return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30)); }

}  // namespace

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::none: return "none";
    case Finish::stop: return "stop";
    case Finish::length: return "length";
    case Finish::cancelled: return "cancelled";
    case Finish::error: return "error";
  }
  return "?";
}

struct Engine::Running {
  Id id;
  Request request;
  Session own;                 // when the request brings none
  Session* session = nullptr;
  std::vector<int32_t> tokens; // prompt and output
  Result result;
  std::optional<Detokenizer> detokenizer;
  StopMatcher stop;
  Clock::time_point submitted, first, last;
  int limit = 0;               // output tokens
  bool cancelled = false;
  explicit Running(Request r) : request(std::move(r)), stop(request.stop) {}
  Sequence& sequence() { return session->sequence; }
};

CacheLimits cache_limits(const ModelConfig& config, int context, int sequences, int checkpoints) {
  const int most = config.max_positions > 0 ? config.max_positions : kDefaultContext;
  if (context > most) usage("-c {}: the model was made for at most {} tokens", context, most);
  if (context < 0) usage("-c {}: expected a number of tokens above 0", context);
  const int tokens = context > 0 ? context : std::min(most, kDefaultContext);
  return {pages_for(tokens) * sequences, sequences, checkpoints, tokens};
}

BuildOptions build_options(const EngineOptions& options) {
  BuildOptions build;
  build.max_tokens = options.chunk;
  build.mla = options.mla;
  build.exec = options.exec;
  build.dsa = options.dsa;
  build.tier = options.tier;
  build.index_cache = options.index_cache;
  build.latent_cache = options.latent_cache;
  return build;
}

void check_memory(const Model& model, const MemoryPlan& plan) {
  const size_t available = available_memory();
  if (available == 0 || plan.total() <= available) return;
  fail("{}: needs {} (weights {}, caches {}, state {}, scratch {}) but only {} of memory is available; lower -c, or use "
       "a smaller or quantised model", model.checkpoint().path(), gib(plan.total()), gib(plan.weights),
       gib(plan.latent + plan.index), gib(plan.state), gib(plan.scratch), gib(available));
}

Engine::Engine(const EngineOptions& options) {
  const KernelTable& kernels = choose_kernels(options.isa, cpu_features());
  const int count = options.threads > 0 ? options.threads : default_threads().threads;
  BuildOptions build = build_options(options);
  build.max_logits = std::max(16, options.sequences);
  model_ = std::make_unique<Model>(options.model, kernels, build);
  limits_ = cache_limits(model_->config(), options.context, options.sequences,
                         model_->cache_shape().slot_bytes ? options.checkpoints : 0);
  memory_ = model_->memory(limits_, count);
  if (options.on_plan) options.on_plan(memory_);
  if (options.check_memory) check_memory(*model_, memory_);
  try {
    tokenizer_ = Tokenizer::load(model_->checkpoint().path());
  } catch (const Error& error) {
    if (options.need_tokenizer) throw;
    tokenizer_error_ = error.what();
  }
  team_ = std::make_unique<Team>(count, options.pin, kernels.thread_init);
  model_->load(*team_, options.on_load, options.cache);
  caches_ = std::make_unique<Caches>(model_->cache_shape(), limits_);
  model_->bind(*caches_, *team_);
  if (options.trace) {
    trace_ = std::make_unique<Trace>(model_->parts().graph, count);
    model_->executor().trace(trace_.get());
  }
  batch_ = std::make_unique<Batch>(options.chunk, build.max_logits, options.sequences, limits_.max_tokens);
  sampler_ = std::make_unique<Sampler>(*team_, model_->config().vocab, tokenizer_ ? tokenizer_->vocab_size() : INT32_MAX);
  end_tokens_ = {model_->config().stop.begin(), model_->config().stop.end()};
  if (tokenizer_)
    for (const std::string& name : chat().stops())
      if (const std::optional<int> id = tokenizer_->token_id(name)) end_tokens_.push_back(*id);
}

Engine::~Engine() = default;

void Engine::save_trace(const std::string& path) const {
  WEFT_CHECK(trace_, "the engine was made without a trace");
  trace_->write(path);
}

const Tokenizer& Engine::tokenizer() const {
  if (!tokenizer_) throw Error(tokenizer_error_);
  return *tokenizer_;
}

const ChatFormat& Engine::chat() const { return chat_format(model_->arch().chat); }

std::vector<int32_t> Engine::encode(std::string_view text, Tokenizer::Specials specials) const {
  const std::vector<int> ids = tokenizer().encode(text, specials);
  return {ids.begin(), ids.end()};
}

std::vector<int32_t> Engine::encode(const std::vector<ChatSegment>& segments) const {
  std::vector<int32_t> ids;
  for (const ChatSegment& s : segments) {
    const auto part = encode(s.text, s.allow_special ? Tokenizer::Specials::all : Tokenizer::Specials::none);
    ids.insert(ids.end(), part.begin(), part.end());
  }
  return ids;
}

Engine::Id Engine::submit(Request request) {
  const int vocab = config().vocab, prompt = static_cast<int>(request.prompt.size());
  if (prompt == 0) usage("the prompt is empty: give at least one token");
  for (int i = 0; i < prompt; ++i)
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab)
      usage("prompt: token id {} at position {} is outside the vocabulary of {}", request.prompt[i], i, vocab);
  if (prompt >= context())
    usage("the prompt has {} tokens, but the context holds {} and needs room for one more: raise -c", prompt, context());
  for (const int32_t id : request.stop_ids)
    if (id < 0 || id >= vocab) usage("stop token id {} is outside the vocabulary of {}", id, vocab);
  if (request.max_tokens < -1) usage("max_tokens {}: expected -1 (no limit) or more", request.max_tokens);
  request.sampling.validate(vocab);

  auto r = std::make_unique<Running>(std::move(request));
  r->id = next_id_++;
  r->tokens = r->request.prompt;
  r->limit = context() - prompt;
  if (r->request.max_tokens >= 0) r->limit = std::min(r->limit, r->request.max_tokens);
  r->result.stats.prompt_tokens = prompt;
  r->submitted = Clock::now();
  if (tokenizer_) r->detokenizer.emplace(*tokenizer_, r->request.hide_special);
  waiting_.push_back(std::move(r));
  return waiting_.back()->id;
}

void Engine::cancel(Id id) {
  for (auto& r : waiting_)
    if (r->id == id) r->cancelled = true;
  for (auto& r : running_)
    if (r->id == id) r->cancelled = true;
}

// Reuses what the session's caches already hold of the prompt. At least one token is always computed.
void Engine::begin(Running& r) {
  if (!r.request.session) {
    r.own.sequence = caches_->create();
    r.session = &r.own;
    return;
  }
  r.session = r.request.session;
  if (!r.session->sequence.alive()) *r.session = new_session();
  std::vector<int32_t>& held = r.session->tokens;
  const size_t most = std::min(held.size(), r.tokens.size() - 1);
  const auto same = std::mismatch(held.begin(), held.begin() + most, r.tokens.begin()).first - held.begin();
  const int keep = r.sequence().truncation_point(static_cast<int>(same));
  r.sequence().truncate(keep);
  held.resize(keep);
  r.result.stats.reused_tokens = keep;
}

void Engine::admit() {
  while (!waiting_.empty()) {
    Running& r = *waiting_.front();
    const bool resumes = r.request.session && r.request.session->sequence.alive();
    const bool busy = r.request.session && std::any_of(running_.begin(), running_.end(), [&](const auto& other) {
      return other->session == r.request.session;
    });
    if (!r.cancelled && busy) return;  // one request of a conversation after the other
    const bool full = !r.cancelled && !resumes && !caches_->can_create();
    if (full && !running_.empty()) return;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    if (full) finish(r, Finish::error, "all sequences are held by sessions that do nothing: close one, or allow more at once");
    else if (!r.cancelled) begin(r);
  }
}

bool Engine::step() {
  admit();
  for (auto it = running_.begin(); it != running_.end();) {  // those that were cancelled, or ask for nothing
    Running& r = **it;
    if (r.result.finish == Finish::none && r.cancelled) finish(r, Finish::cancelled);
    else if (r.result.finish == Finish::none && r.limit == 0) finish(r, Finish::length);
    it = r.result.finish != Finish::none ? running_.erase(it) : std::next(it);
  }
  if (running_.empty()) return !waiting_.empty();

  std::vector<Job> jobs;
  std::vector<Running*> by_job;
  for (auto& r : running_) {
    jobs.push_back({&r->sequence(), &r->tokens});
    by_job.push_back(r.get());
  }
  const std::vector<Scheduled> work = schedule(jobs, *batch_);
  WEFT_CHECK(!work.empty(), "no sequence can go on");  // pages are planned for full contexts
  model_->run(batch_->header());
  std::vector<SampleRow> rows;
  for (const Scheduled& s : work) {
    if (s.logit_row < 0) continue;
    const Running& r = *by_job[s.job];
    rows.push_back({&r.request.sampling, {model_->logits(s.logit_row), static_cast<size_t>(config().vocab)},
                    {r.tokens, static_cast<size_t>(r.result.stats.prompt_tokens)}});
  }
  sampler_->sample(rows);
  auto row = rows.begin();
  for (const Scheduled& s : work) {
    Running& r = *by_job[s.job];
    r.sequence().commit(s.tokens);
    const int position = r.sequence().position();
    r.session->tokens.insert(r.session->tokens.end(), r.tokens.begin() + position - s.tokens, r.tokens.begin() + position);
    if (r.result.output.empty() && r.request.on_prefill)
      r.request.on_prefill(position, r.result.stats.prompt_tokens);
    if (s.logit_row < 0) continue;
    if (r.result.output.empty()) r.sequence().checkpoint();
    take_token(r, *row++, batch_->header().logit_row[s.logit_row]);
  }
  std::erase_if(running_, [](const auto& r) { return r->result.finish != Finish::none; });
  return !running_.empty() || !waiting_.empty();
}

void Engine::take_token(Running& r, const SampleRow& row, int batch_row) {
  if (!row.error.empty()) {
    const std::string where = model_->first_nonfinite(batch_row);
    finish(r, Finish::error, fmt::format("{} at position {}: first NaN or Inf in {}", row.error,
                                         r.sequence().position() - 1, where.empty() ? "the output head" : where));
    *r.session = {};  // what its caches hold cannot be trusted
    return;
  }
  r.last = Clock::now();
  if (r.result.output.empty()) r.first = r.last;
  const int32_t token = row.sample.token;
  r.result.output.push_back(token);
  r.tokens.push_back(token);
  const auto ends = [token](const std::vector<int32_t>& ids) { return std::find(ids.begin(), ids.end(), token) != ids.end(); };
  const bool stops = ends(r.request.stop_ids) || (!r.request.sampling.ignore_eos && ends(end_tokens_));
  if (stops) {
    finish(r, Finish::stop);
    return;
  }
  emit(r, text_of(r, token), token);
  if (r.stop.stopped()) finish(r, Finish::stop);
  else if (static_cast<int>(r.result.output.size()) >= r.limit) finish(r, Finish::length);
}

std::string Engine::text_of(Running& r, int32_t token) {
  if (!r.detokenizer) return "";
  try {
    return r.detokenizer->push(token);
  } catch (const Error&) {
    return "";  // an id that the tokenizer leaves out between others
  }
}

void Engine::emit(Running& r, const std::string& text, int32_t token) {
  const std::string shown = r.stop.push(text);
  r.result.text += shown;
  if (r.request.on_token) r.request.on_token(token, shown);
}

void Engine::finish(Running& r, Finish reason, const std::string& error) {
  if (!r.stop.stopped()) {
    std::string rest = r.detokenizer ? r.stop.push(r.detokenizer->flush()) : "";
    rest += r.stop.flush();
    r.result.text += rest;
    if (!rest.empty() && r.request.on_token) r.request.on_token(-1, rest);
  }
  if (r.stop.stopped() && reason == Finish::length) reason = Finish::stop;
  r.result.finish = reason;
  r.result.error = error;
  r.result.stats.output_tokens = static_cast<int>(r.result.output.size());
  if (!r.result.output.empty()) {
    r.result.stats.prefill_seconds = seconds(r.submitted, r.first);
    r.result.stats.decode_seconds = seconds(r.first, r.last);
  }
  done_.emplace_back(r.id, std::move(r.result));
  r.result.finish = reason;
}

std::optional<Result> Engine::take(Id id) {
  for (auto it = done_.begin(); it != done_.end(); ++it)
    if (it->first == id) {
      Result result = std::move(it->second);
      done_.erase(it);
      return result;
    }
  return std::nullopt;
}

Result Engine::run(Request request) {
  const Id id = submit(std::move(request));
  for (;;) {
    if (std::optional<Result> result = take(id)) return *std::move(result);
    step();
  }
}

}  // namespace weft
