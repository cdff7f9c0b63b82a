// weft eval ppl and kld: how well a model predicts a text, and how far a run is from a reference.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "app/eval.h"
#include "app/model_flags.h"
#include "app/report.h"
#include "app/score.h"
#include "base/check.h"
#include "text/tokenizer.h"

namespace weft {
namespace {

struct Text {
  std::string file;
  std::vector<int32_t> tokens;
  size_t bytes = 0;  // that the tokens which count stand for; 0: unknown
};

struct TextScore {
  Text text;
  int counted = 0;
  double nll = 0;  // nats, summed
};

double perplexity(double nll, int counted) {
  return std::exp(nll / std::max(counted, 1));
}
double bits_per_byte(double nll, size_t bytes) {
  return nll / std::log(2.0) / static_cast<double>(bytes);
}

// ---- ppl

struct PplFlags {
  CommonFlags common;
  std::vector<std::string> files;
  std::string save;
  int stride = 0, tokens = 0;
  bool ids = false, json = false, quiet = false;
};

// Bytes of the original text: that of the file, without what no prediction covers. A BOS token stands for
// none.
Text read_text(const PplFlags& flags, const std::string& file, const Direct& direct,
               const Tokenizer* tokenizer) {
  Text text{file, {}, 0};
  const std::string content = read_prompt_file(file);
  if (flags.ids) {
    text.tokens = parse_ids(content);
    for (const int32_t id : text.tokens)
      if (id < 0 || id >= direct.config().vocab)
        fail("{}: token id {} is outside the vocabulary of {}", printable(file), id, direct.config().vocab);
  } else {
    const std::vector<int> ids = tokenizer->encode(content, Tokenizer::Specials::none);
    text.tokens.assign(ids.begin(), ids.end());
    text.bytes = content.size();
    if (wants_bos(direct.config(), direct.model().checkpoint().path()))
      text.tokens.insert(text.tokens.begin(), direct.config().bos);
    else if (!ids.empty())
      text.bytes -= std::min(text.bytes, tokenizer->token_bytes(ids[0]).size());
  }
  if (flags.tokens && static_cast<int>(text.tokens.size()) > flags.tokens) {
    if (text.bytes)
      for (size_t i = flags.tokens; i < text.tokens.size(); ++i)
        text.bytes -= std::min(text.bytes, tokenizer->token_bytes(text.tokens[i]).size());
    text.tokens.resize(flags.tokens);
  }
  if (text.tokens.size() < 2)
    fail("{}: {} token(s): nothing to predict", printable(file), text.tokens.size());
  return text;
}

std::string hash_of(const std::vector<int32_t>& tokens, const Tokenizer* tokenizer) {
  return tokenizer ? text_hash(tokenizer->decode(tokens)) : "";
}

std::unique_ptr<LogitWriter> begin_reference(const PplFlags& flags, const Text& text, int stride,
                                             const Direct& direct, const Tokenizer* tokenizer) {
  if (flags.save.empty()) return nullptr;
  const LogitHeader header{direct.model().checkpoint().name(),
                           direct.config().vocab,
                           direct.context(),
                           stride,
                           hash_of(text.tokens, tokenizer),
                           text.tokens};
  return std::make_unique<LogitWriter>(flags.save, header, static_cast<int>(text.tokens.size()) - 1);
}

TextScore score_text(Direct& direct, Text text, int stride, LogitWriter* writer, Progress& progress) {
  const std::vector<Window> windows =
      sliding_windows(static_cast<int>(text.tokens.size()), direct.context(), stride);
  std::vector<double> nll(text.tokens.size() - 1);
  const size_t row_bytes = logit_row_bytes(direct.config().vocab);
  std::vector<std::byte> rows(writer ? row_bytes * direct.chunk() : 0);
  int written = 0;
  ScoreHooks hooks;
  hooks.row = [&](int i, int target, std::span<const float> logits) {
    const double lse = log_sum_exp(logits);
    nll[i] = lse - logits[text.tokens[target]];
    if (writer) LogitWriter::encode(logits, lse, rows.data() + (i - written) * row_bytes);
  };
  hooks.rows_done = [&](int done) {
    if (interrupted()) throw ExitCode{kExitInterrupted};
    if (writer) writer->write({rows.data(), (done - written) * row_bytes});
    written = done;
  };
  hooks.progress = [&](int64_t read, int64_t total) {
    progress.update(
        static_cast<double>(read) / static_cast<double>(total),
        fmt::format("{} of {} tokens, perplexity {:.3f}", read, total,
                    perplexity(std::accumulate(nll.begin(), nll.begin() + written, 0.0), written)));
  };
  score(direct, text.tokens, windows, hooks);
  progress.clear();
  if (writer) writer->finish();
  const double sum = std::accumulate(nll.begin(), nll.end(), 0.0);
  return {std::move(text), static_cast<int>(nll.size()), sum};
}

Json score_json(const TextScore& s) {
  Json out = {{"file", s.text.file},
              {"tokens", s.text.tokens.size()},
              {"counted", s.counted},
              {"nll", s.nll},
              {"perplexity", perplexity(s.nll, s.counted)}};
  out["bytes"] = s.text.bytes ? Json(s.text.bytes) : Json();  // null: token ids have none
  out["bits_per_byte"] = s.text.bytes ? Json(bits_per_byte(s.nll, s.text.bytes)) : Json();
  return out;
}

void print_score(const TextScore& s) {
  fmt::print("| {:<32} | {:>8} | {:>9} | {:>10.4f} | {:>10.4f} | {:>9} |\n", s.text.file, s.counted,
             s.text.bytes, s.nll / s.counted, perplexity(s.nll, s.counted),
             s.text.bytes ? fmt::format("{:.4f}", bits_per_byte(s.nll, s.text.bytes)) : "-");
}

void run_ppl(const PplFlags& flags) {
  if (!flags.save.empty() && flags.files.size() != 1) usage("--save-logits: give one file");
  if (flags.tokens < 0) usage("--tokens {}: expected 0 (all) or more", flags.tokens);
  catch_interrupts(2);
  const Notes notes(flags.quiet);
  std::unique_ptr<Tokenizer> tokenizer;
  if (!flags.ids) tokenizer = Tokenizer::load(resolve_model_folder(flags.common.model));
  DirectOptions options;
  options.max_logits = flags.common.chunk;
  const std::unique_ptr<Direct> direct = load_direct(flags.common, notes, options);
  const int stride = flags.stride ? flags.stride : std::max(1, direct->context() / 2);
  sliding_windows(2, direct->context(), stride);  // its errors, now
  std::vector<Text> texts;
  for (const std::string& file : flags.files)
    texts.push_back(read_text(flags, file, *direct, tokenizer.get()));
  std::vector<TextScore> scores;
  TextScore all{{"all", {}, 0}};
  Json files = Json::array();
  if (!flags.json)
    fmt::print(
        "| {:<32} | {:>8} | {:>9} | {:>10} | {:>10} | {:>9} |\n| :{:-<31} | {:->7}: | {:->8}: | {:->9}: | "
        "{:->9}: | {:->8}: |\n",
        "file", "tokens", "bytes", "nats/token", "perplexity", "bits/byte", "", "", "", "", "", "");
  const double start = monotonic_seconds();
  for (Text& text : texts) {
    Progress progress(notes, "reading  ");
    const auto writer = begin_reference(flags, text, stride, *direct, tokenizer.get());
    scores.push_back(score_text(*direct, std::move(text), stride, writer.get(), progress));
    const TextScore& s = scores.back();
    all.counted += s.counted, all.nll += s.nll, all.text.bytes += s.text.bytes;
    if (flags.json)
      files.push_back(score_json(s));
    else
      print_score(s);
  }
  const double seconds = monotonic_seconds() - start;
  if (flags.json) {
    Json out = score_json(all);
    out.erase("file"), out.erase("tokens");
    out.update(Json{{"files", files},
                    {"model", direct->model().checkpoint().name()},
                    {"window", direct->context()},
                    {"stride", stride},
                    {"dsa", flags.common.dsa},
                    {"isa", direct->kernels().isa},
                    {"threads", direct->threads()},
                    {"seconds", seconds}});
    print_json(out);
  } else {
    if (scores.size() > 1) print_score(all);
    fmt::print("\nwindows of {} tokens, each {} further on; {}, --dsa={}; {:.1f} s\n", direct->context(),
               stride, direct->kernels().isa, flags.common.dsa, seconds);
  }
  if (!flags.save.empty()) notes.line("reference " + flags.save);
}

// ---- kld

struct KldFlags {
  CommonFlags common;
  std::string reference;
  bool json = false, quiet = false;
};

struct KldReport {
  double mean = 0, error = 0, median = 0, p99 = 0, max = 0, same_top = 0;
  double reference_perplexity = 0, perplexity = 0;
  int rows = 0;
};

KldReport summarize(std::vector<Divergence> rows, double nll) {
  KldReport r;
  r.rows = static_cast<int>(rows.size());
  const double n = r.rows;
  std::vector<double> kl;
  double reference = 0, squares = 0;
  for (const Divergence& d : rows) {
    kl.push_back(d.kl);
    r.mean += d.kl / n;
    squares += d.kl * d.kl / n;
    reference += d.reference_nll;
    r.same_top += d.same_top / n;
  }
  std::sort(kl.begin(), kl.end());
  // The smallest value that a share of q of the rows does not exceed.
  const auto quantile = [&](double q) { return kl[std::max(0, static_cast<int>(std::ceil(q * n)) - 1)]; };
  r.error = r.rows > 1 ? std::sqrt(std::max(0.0, squares - r.mean * r.mean) / (n - 1)) : 0;
  r.median = quantile(0.5), r.p99 = quantile(0.99), r.max = kl.back();
  r.reference_perplexity = perplexity(reference, r.rows), r.perplexity = perplexity(nll, r.rows);
  return r;
}

void check_reference(const LogitReader& reference, const KldFlags& flags, const Direct& direct) {
  const LogitHeader& h = reference.header();
  const std::string where = printable(flags.reference), folder = direct.model().checkpoint().path();
  if (h.vocab != direct.config().vocab)
    fail("{}: made by {} with a vocabulary of {}, but {} has {}", where, printable(h.model), h.vocab, folder,
         direct.config().vocab);
  for (const int32_t id : h.tokens)
    if (id < 0 || id >= h.vocab) fail("{}: token id {} is outside its vocabulary of {}", where, id, h.vocab);
  if (static_cast<int>(h.tokens.size()) - 1 != reference.rows())
    fail("{}: {} rows for {} tokens", where, reference.rows(), h.tokens.size());
  if (h.text_hash.empty()) return;
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(folder);
  std::string hash;
  try {
    hash = hash_of(h.tokens, tokenizer.get());
  } catch (const Error&) {  // an id this tokenizer does not have: the hash differs too
  }
  if (hash != h.text_hash)
    fail("{}: its tokens are another text under the tokenizer of {}: made by {} with another tokenizer",
         where, folder, printable(h.model));
}

void run_kld(const KldFlags& flags) {
  catch_interrupts(2);
  const Notes notes(flags.quiet);
  LogitReader reference(flags.reference);
  const LogitHeader& header = reference.header();
  CommonFlags common = flags.common;
  if (common.context && common.context != header.window)
    usage("-c {}: {} was made with windows of {}", common.context, printable(flags.reference), header.window);
  common.context = header.window;
  DirectOptions options;
  options.max_logits = common.chunk;
  const std::unique_ptr<Direct> direct = load_direct(common, notes, options);
  check_reference(reference, flags, *direct);
  std::vector<Divergence> rows(header.tokens.size() - 1);
  std::vector<double> nll(rows.size());
  const size_t row_bytes = logit_row_bytes(header.vocab);
  std::vector<std::byte> buffer;
  int done = 0, loaded = 0;
  // Rows of a step are judged by several threads: the reference's are read before.
  ScoreHooks hooks;
  hooks.rows_about = [&](int count) {
    reference.read(count, buffer);
    loaded = done;
  };
  hooks.row = [&](int i, int target, std::span<const float> logits) {
    const double lse = log_sum_exp(logits);
    nll[i] = lse - logits[header.tokens[target]];
    rows[i] = compare_row(buffer.data() + (i - loaded) * row_bytes, logits, lse, header.tokens[target]);
  };
  hooks.rows_done = [&](int count) {
    if (interrupted()) throw ExitCode{kExitInterrupted};
    done = count;
  };
  Progress progress(notes, "comparing");
  hooks.progress = [&](int64_t read, int64_t total) {
    progress.update(static_cast<double>(read) / static_cast<double>(total),
                    fmt::format("{} of {} tokens", read, total));
  };
  score(*direct, header.tokens,
        sliding_windows(static_cast<int>(header.tokens.size()), header.window, header.stride), hooks);
  progress.clear();
  const KldReport r = summarize(std::move(rows), std::accumulate(nll.begin(), nll.end(), 0.0));
  if (flags.json) {
    print_json({{"model", direct->model().checkpoint().name()},
                {"reference_model", header.model},
                {"reference", flags.reference},
                {"tokens", r.rows},
                {"mean_kld", r.mean},
                {"mean_kld_error", r.error},
                {"median_kld", r.median},
                {"p99_kld", r.p99},
                {"max_kld", r.max},
                {"same_top", r.same_top},
                {"perplexity", r.perplexity},
                {"reference_perplexity", r.reference_perplexity},
                {"window", header.window},
                {"stride", header.stride},
                {"dsa", common.dsa},
                {"isa", direct->kernels().isa}});
    return;
  }
  fmt::print("{} against {} ({}), {} tokens, {}, --dsa={}\n", direct->model().checkpoint().name(),
             flags.reference, header.model, r.rows, direct->kernels().isa, common.dsa);
  fmt::print(
      "  mean KL          {:.3g} +- {:.1g} nats\n  median KL        {:.3g}\n  99 % below       {:.3g}\n"
      "  max KL           {:.3g}\n  same top token   {:.3f} %\n  perplexity       {:.4f} (reference "
      "{:.4f})\n",
      r.mean, r.error, r.median, r.p99, r.max, 100 * r.same_top, r.perplexity, r.reference_perplexity);
}

}  // namespace

void add_eval_ppl(CLI::App& eval) {
  CLI::App* sub =
      eval.add_subcommand("ppl", "Perplexity and bits per byte of texts, in sliding windows of -c tokens");
  auto flags = std::make_shared<PplFlags>();
  add_engine_flags(*sub, flags->common, false);
  sub->add_option("files", flags->files, "Plain texts")->type_name("FILE")->required()->take_all();
  sub->add_option("--stride", flags->stride, "Tokens from one window to the next (default: half a window)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  sub->add_option("--tokens", flags->tokens, "Only the first tokens of each text (default: all)")
      ->type_name("N");
  sub->add_option("--save-logits", flags->save,
                  "Keep every distribution for weft eval kld: 2 bytes x vocabulary a token")
      ->type_name("FILE");
  sub->add_flag("--ids", flags->ids, "The files are token ids, as in \"1 2 3\"; needs no tokenizer");
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] { run_ppl(*flags); });
}

void add_eval_kld(CLI::App& eval) {
  CLI::App* sub = eval.add_subcommand("kld", "KL divergence of this run from a reference run");
  auto flags = std::make_shared<KldFlags>();
  add_engine_flags(*sub, flags->common);
  sub->add_option("--reference", flags->reference, "What weft eval ppl --save-logits wrote")
      ->type_name("FILE")
      ->required();
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] { run_kld(*flags); });
}

}  // namespace weft
