#include "app/model_flags.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>

#include "base/check.h"
#include "base/cpu.h"
#include "base/json.h"
#include "base/memory.h"
#include "engine/stop.h"

namespace weft {
namespace {

std::string size_text(size_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  return mib < 1000 ? fmt::format("{:.1f} MiB", mib) : fmt::format("{:.2f} GiB", mib / 1024);
}

std::string time_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.1f} ms", 1e3 * seconds) : fmt::format("{:.2f} s", seconds);
}

void say_threads(const CommonFlags& flags, const Notes& notes) {
  const ThreadChoice usual = default_threads();
  if (flags.threads > usual.threads) {
    notes.warning(
        fmt::format("-t {}: more threads than CPUs here wait for each other; the default would be {}",
                    flags.threads, usual.reason));
  } else {
    notes.line(flags.threads > 0 ? fmt::format("cpu       {} threads, as asked for", flags.threads)
                                 : "cpu       " + usual.reason);
  }
}

void watch_loading(EngineOptions& options, Progress& progress, const Notes& notes) {
  options.on_plan = [&](const MemoryPlan& plan) {
    notes.line(fmt::format("memory    {}: weights {}, caches {}, states {}, scratch {}",
                           size_text(plan.total()), size_text(plan.weights),
                           size_text(plan.latent + plan.index), size_text(plan.state),
                           size_text(plan.scratch)));
  };
  options.on_load = [&](const LoadProgress& load) {
    if (interrupted()) {
      progress.clear();
      throw ExitCode{kExitInterrupted};
    }
    if (load.total > 0)
      progress.update(static_cast<double>(load.done) / static_cast<double>(load.total),
                      fmt::format("{} of {}", size_text(load.done), size_text(load.total)));
  };
}

void say_loaded(const Model& model, int context, Progress& progress, const Notes& notes) {
  progress.clear();
  for (const std::string& warning : model.config().warnings) notes.warning(warning);
  if (const std::string unused = model.checkpoint().unused_summary(); !unused.empty())
    notes.line("weights   " + unused);
  notes.line(
      fmt::format("model     {}: {}, {} layers, vocabulary {}, context {}; {} kernels; loaded in {:.1f} s",
                  printable(model.checkpoint().name()), model.config().family, model.config().num_layers(),
                  model.config().vocab, context, model.kernels().isa, progress.seconds()));
}

}  // namespace

std::unique_ptr<Engine> load_engine(const CommonFlags& flags, const Notes& notes, bool need_tokenizer) {
  EngineOptions options = engine_options(flags);
  options.need_tokenizer = need_tokenizer;
  return load_engine(flags, notes, options);
}

std::unique_ptr<Engine> load_engine(const CommonFlags& flags, const Notes& notes, EngineOptions options) {
  say_threads(flags, notes);
  Progress progress(notes, "loading  ");
  watch_loading(options, progress, notes);
  auto engine = std::make_unique<Engine>(options);
  say_loaded(engine->model(), engine->context(), progress, notes);
  return engine;
}

std::unique_ptr<Direct> load_direct(const CommonFlags& flags, const Notes& notes, DirectOptions options) {
  options.engine = engine_options(flags);
  say_threads(flags, notes);
  Progress progress(notes, "loading  ");
  watch_loading(options.engine, progress, notes);
  auto direct = std::make_unique<Direct>(options);
  say_loaded(direct->model(), direct->context(), progress, notes);
  return direct;
}

bool wants_bos(const ModelConfig& config, const std::string& folder) {
  if (config.bos < 0) return false;
  const std::string path = folder + "/tokenizer_config.json";
  if (::access(path.c_str(), R_OK) != 0) return false;
  const Json json = parse_json_file(path);
  return Fields(json, path).boolean("add_bos_token", false);
}

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void add_sampling_flags(CLI::App& sub, SamplingFlags& flags) {
  const char* group = "Sampling";
  sub.add_option("-n,--predict", flags.max_tokens,
                 "Most tokens to generate; -1: until the context is full (default)")
      ->type_name("N");
  sub.add_option("--temp", flags.temperature,
                 "Temperature, 0: always the likeliest token (default: generation_config.json's, else 1)")
      ->type_name("X")
      ->group(group);
  sub.add_option("--top-k", flags.top_k, "Only the K likeliest tokens, 0: all (default: the model's, else 0)")
      ->type_name("K")
      ->group(group);
  sub.add_option("--top-p", flags.top_p,
                 "Only the likeliest tokens of total probability X (default: the model's, else 0.95)")
      ->type_name("X")
      ->group(group);
  sub.add_option("--min-p", flags.min_p,
                 "Only tokens at least X times as likely as the likeliest (default: 0)")
      ->type_name("X")
      ->group(group);
  sub.add_option("--repeat-penalty", flags.repeat_penalty,
                 "Divides the logits of tokens seen before (default: 1)")
      ->type_name("X")
      ->group(group);
  sub.add_option("--presence-penalty", flags.presence_penalty,
                 "Taken off the logits of tokens put out (default: 0)")
      ->type_name("X")
      ->group(group);
  sub.add_option("--frequency-penalty", flags.frequency_penalty,
                 "Taken off the logits of tokens for each time put out (default: 0)")
      ->type_name("X")
      ->group(group);
  sub.add_option("--seed", flags.seed, "Same seed, same text; -1: drawn and shown (default)")
      ->type_name("N")
      ->group(group);
  // By hand: CLI11 would take "{}" for an empty list and "[a,b]" for two strings.
  sub.add_option(
         "--stop",
         [&flags](const CLI::results_t& words) {
           flags.stop = words;
           return true;
         },
         "End before this text; may be given several times")
      ->type_name("TEXT")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false)
      ->group(group);
  sub.add_flag("--ignore-eos", flags.ignore_eos, "Go on after the end-of-sequence token")->group(group);
}

void check_sampling_flags(const SamplingFlags& flags) {
  if (flags.max_tokens < -1)
    usage("-n {}: expected a number of tokens, or -1 for no limit", flags.max_tokens);
  if (flags.seed < -1) usage("--seed {}: expected a number from 0 up, or -1 to draw one", flags.seed);
  const StopMatcher stops(flags.stop);
  sampling_params(flags, ModelConfig()).validate(INT32_MAX);
}

SamplingParams sampling_params(const SamplingFlags& flags, const ModelConfig& config, std::string* says) {
  SamplingParams params;
  std::string text;
  const auto choose = [&](const char* name, auto given, auto from_file, auto otherwise) -> double {
    const double value = given       ? static_cast<double>(*given)
                         : from_file ? static_cast<double>(*from_file)
                                     : otherwise;
    const bool taken = !given && from_file;
    // A float read from the file would show as 0.600000023841858.
    text += fmt::format("{}{} {:.6g}{}", text.empty() ? "" : ", ", name, value,
                        taken ? " (generation_config.json)" : "");
    return value;
  };
  params.temperature = choose("temperature", flags.temperature, config.default_temperature, 1.0);
  if (!params.greedy()) {
    params.top_p = choose("top-p", flags.top_p, config.default_top_p, 0.95);
    if (flags.top_k || config.default_top_k)
      params.top_k = static_cast<int64_t>(choose("top-k", flags.top_k, config.default_top_k, 0));
  } else {
    // They change nothing, but a value out of range is still wrong.
    params.top_p = flags.top_p.value_or(1);
    params.top_k = flags.top_k.value_or(0);
  }
  params.min_p = flags.min_p;
  params.repetition_penalty = flags.repeat_penalty;
  params.presence_penalty = flags.presence_penalty;
  params.frequency_penalty = flags.frequency_penalty;
  params.ignore_eos = flags.ignore_eos;
  if (flags.seed >= 0) {
    params.seed = static_cast<uint64_t>(flags.seed);
  } else {
    params.seed = std::random_device()();
  }
  if (!params.greedy()) text += fmt::format(", seed {}", params.seed);
  if (says) *says = text;
  return params;
}

std::string read_all(int fd, const std::string& what) {
  std::string text;
  char bytes[1 << 16];
  for (;;) {
    const ssize_t n = ::read(fd, bytes, sizeof bytes);
    if (n == 0) return text;
    if (n > 0) {
      text.append(bytes, static_cast<size_t>(n));
    } else if (errno != EINTR) {
      fail("cannot read {}: {}", what, std::strerror(errno));
    } else if (interrupted()) {
      throw ExitCode{kExitInterrupted};
    }
  }
}

std::string read_prompt_file(const std::string& path) {
  // Not base's read_file: a pipe (-f <(...)) has no size.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("cannot read {}: {}", printable(path), std::strerror(errno));
  try {
    std::string text = read_all(fd, printable(path));
    ::close(fd);
    return text;
  } catch (...) {
    ::close(fd);
    throw;
  }
}

std::vector<int32_t> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  const auto separates = [](char c) { return c == ' ' || c == ',' || c == '\n' || c == '\t' || c == '\r'; };
  for (size_t at = 0; at < text.size();) {
    if (separates(text[at])) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end < text.size() && !separates(text[end])) ++end;
    int32_t id = 0;
    const auto [stop, error] = std::from_chars(text.data() + at, text.data() + end, id);
    if (error != std::errc() || stop != text.data() + end)
      usage("\"{}\" is not a token id: give whole numbers, as in \"1 2 3\"",
            printable(std::string_view(text).substr(at, end - at), 40));
    ids.push_back(id);
    at = end;
  }
  return ids;
}

std::string describe_stats(const RequestStats& stats) {
  const auto tokens = [](int n) { return fmt::format("{} token{}", n, n == 1 ? "" : "s"); };
  std::string text = "prompt " + tokens(stats.prompt_tokens);
  if (stats.reused_tokens > 0) text += fmt::format(" ({} reused)", stats.reused_tokens);
  if (const double rate = stats.prefill_rate(); rate > 0 && std::isfinite(rate))
    text += fmt::format(", {:.1f} tokens/s", rate);
  text += "; output " + tokens(stats.output_tokens);
  if (const double rate = stats.decode_rate(); rate > 0 && std::isfinite(rate))
    text += fmt::format(", {:.1f} tokens/s", rate);
  if (stats.prefill_seconds > 0) text += fmt::format("; first token after {}", time_text(stats.prefill_seconds));
  return text + fmt::format("; peak memory {}", size_text(peak_rss()));
}

}  // namespace weft
