// weft eval ppl and kld, against sums worked out here from logits.
#include <cmath>

#include "app/score.h"
#include "safetensors_lite.h"
#include "tools_support.h"

namespace weft {
namespace {

using namespace test;

double nll_of(const float* logits, size_t vocab, int target) {
  double top = logits[0], sum = 0;
  for (size_t i = 1; i < vocab; ++i) top = std::max<double>(top, logits[i]);
  for (size_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] - top);
  return top + std::log(sum) - logits[target];
}

void write_ids(const std::string& path, const std::vector<int32_t>& ids) {
  std::ofstream file(path);
  for (const int32_t id : ids) file << id << ' ';
}

std::vector<int32_t> some_ids(int count, int vocab) {
  std::vector<int32_t> ids;
  uint32_t x = 3;
  for (int i = 0; i < count; ++i)
    ids.push_back(static_cast<int32_t>(((x = x * 1664525 + 1013904223) >> 16) % vocab));
  return ids;
}

// A model with a tokenizer: vocabulary 8192, so that both test tokenizers fit.
std::string speaking_model(const Scratch& scratch, const std::string& name, uint64_t seed,
                           const std::string& tokenizer = "kimi_small") {
  SynthSpec spec = tiny_spec("kimi_k31");
  spec.vocab = 8192, spec.seed = seed;
  const std::string path = scratch / name;
  synthesize(spec, path, std::string(WEFT_SOURCE_DIR) + "/tests/golden/tokenizers/" + tokenizer);
  return path;
}

constexpr const char* kText =
    "The engine reads what it is given. It says how sure it is of every word, and the sum is what counts "
    "here.\n"
    "A second line follows the first: numbers 1234567, and some \xc3\xa4\xc3\xb6\xc3\xbc as well.\n";

TEST(SlidingWindows, CountEveryTokenOnceWithEnoughBeforeIt) {
  for (const int tokens : {2, 3, 7, 8, 9, 40, 41})
    for (const int window : {2, 8, 64})
      for (int stride = 1; stride < window; ++stride) {
        std::vector<int> counted(tokens);
        for (const Window& w : sliding_windows(tokens, window, stride)) {
          ASSERT_LE(w.end - w.begin, window);
          ASSERT_LT(w.scored, w.end);
          for (int t = w.scored; t < w.end; ++t) ++counted[t];
          if (w.begin > 0) {
            ASSERT_GE(w.scored - w.begin, window - stride) << tokens << " " << window << " " << stride;
          }
        }
        EXPECT_EQ(counted[0], 0);
        for (int t = 1; t < tokens; ++t) ASSERT_EQ(counted[t], 1) << tokens << " " << window << " " << stride;
      }
  EXPECT_THROW(sliding_windows(10, 1, 1), UsageError);
  EXPECT_THROW(sliding_windows(10, 8, 8), UsageError);
  EXPECT_THROW(sliding_windows(10, 8, 0), UsageError);
}

// The reference logits are another implementation's, in double.
TEST(Ppl, IsThatOfTheRecordedLogits) {
  for (const char* name : {"kimi_k31-tiny", "deepseek_v32-tiny"}) {
    const std::string folder = golden_folder(name);
    const Json golden = parse_json_file(folder + "/golden.json");
    const testing::LiteSafetensors file(folder + "/golden.safetensors");
    const Json& c = golden["cases"].back();
    const auto ids = file.get<int32_t>(c["ids"]);
    const auto logits = file.get<float>(c["logits"]);
    const size_t vocab = logits.size() / ids.size();
    double nll = 0;
    for (size_t t = 1; t < ids.size(); ++t) nll += nll_of(logits.data() + (t - 1) * vocab, vocab, ids[t]);
    Scratch scratch;
    write_ids(scratch / "ids", ids);
    const Ran ran =
        weft_command({"eval", "ppl", "-m", folder, scratch / "ids", "--ids", "--isa", "portable", "--json"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    const Json j = ran.json();
    const auto n = static_cast<double>(ids.size() - 1);
    EXPECT_EQ(j["counted"], ids.size() - 1);
    // A logit off by e moves a log-probability by at most 2 e; 3e-4 is verify's bound where nothing is
    // recorded.
    EXPECT_NEAR(j["nll"].get<double>() / n, nll / n, 2 * 3e-4);
    EXPECT_NEAR(j["perplexity"].get<double>(), std::exp(j["nll"].get<double>() / n),
                1e-9 * std::exp(nll / n));
    EXPECT_TRUE(j["bits_per_byte"].is_null());
    EXPECT_EQ(j["files"].size(), 1u);
  }
}

// Every window is a run of its own over its tokens: those that count are the whole's less the context's.
TEST(Ppl, WindowsAreRunsOfTheirOwn) {
  const std::string folder = golden_folder("kimi_k31-tiny");
  Scratch scratch;
  const std::vector<int32_t> ids = some_ids(150, 256);
  const auto nll = [&](int begin, int end, const std::vector<std::string>& more) {
    write_ids(scratch / "part", {ids.begin() + begin, ids.begin() + end});
    std::vector<std::string> words = {"eval",  "ppl",   "-m",       folder,  scratch / "part",
                                      "--ids", "--isa", "portable", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.json()["nll"].get<double>();
  };
  double expected = 0;
  for (const Window& w : sliding_windows(150, 64, 48))
    expected += nll(w.begin, w.end, {}) - (w.scored - w.begin > 1 ? nll(w.begin, w.scored, {}) : 0);
  const double found = nll(0, 150, {"-c", "64", "--stride", "48"});
  EXPECT_NEAR(found, expected, 1e-9 * expected);
  // How steps are cut changes no bit of a row.
  EXPECT_EQ(found, nll(0, 150, {"-c", "64", "--stride", "48", "-b", "64"}));
  EXPECT_NE(found, nll(0, 150, {}));
}

TEST(Ppl, CountsTheBytesOfTheText) {
  Scratch scratch;
  const std::string model = speaking_model(scratch, "m", 1);
  std::ofstream(scratch / "text") << kText;
  const Ran ran = weft_command({"eval", "ppl", "-m", model, scratch / "text", scratch / "text", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json j = ran.json();
  const Json ids = weft_command({"tokenize", "-m", model, "-f", scratch / "text", "--json"}).json();
  const size_t bytes = std::string(kText).size() - ids["pieces"][0].get<std::string>().size();
  ASSERT_EQ(j["files"].size(), 2u);
  EXPECT_EQ(j["files"][0]["bytes"], bytes);
  EXPECT_EQ(j["files"][0]["tokens"], ids["count"]);
  EXPECT_EQ(j["files"][0]["counted"], ids["count"].get<int>() - 1);
  EXPECT_EQ(j["bytes"], 2 * bytes);
  EXPECT_DOUBLE_EQ(j["nll"].get<double>(), 2 * j["files"][0]["nll"].get<double>());
  EXPECT_DOUBLE_EQ(j["bits_per_byte"].get<double>(),
                   j["nll"].get<double>() / std::log(2.0) / static_cast<double>(2 * bytes));
  // Fewer tokens stand for fewer bytes.
  const Json few =
      weft_command({"eval", "ppl", "-m", model, scratch / "text", "--tokens", "4", "--json"}).json();
  size_t first = 0;
  for (int i = 1; i < 4; ++i) first += ids["pieces"][i].get<std::string>().size();
  EXPECT_EQ(few["bytes"], first);
  EXPECT_EQ(few["counted"], 3);

  const std::string table = weft_command({"eval", "ppl", "-m", model, scratch / "text"}).out;
  for (const char* part : {"bits/byte", "perplexity", "windows of"})
    EXPECT_NE(table.find(part), table.npos) << table;
}

TEST(Ppl, SaysWhatIsWrong) {
  Scratch scratch;
  const std::string folder = golden_folder("kimi_k31-tiny");
  write_ids(scratch / "one", {5});
  write_ids(scratch / "big", {5, 6, 256});
  const auto error = [&](std::vector<std::string> words, int code, const std::string& part) {
    words.insert(words.begin(), {"eval", "ppl"});
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_NE(ran.err.find(part), ran.err.npos) << ran.err;
  };
  error({"-m", folder, scratch / "one", "--ids"}, 1, "nothing to predict");
  error({"-m", folder, scratch / "big", "--ids"}, 1, "256 is outside the vocabulary");
  error({"-m", folder, scratch / "none", "--ids"}, 1, "cannot read");
  error({"-m", folder, scratch / "big"}, 1, "tokenizer");
  error({"-m", folder}, 2, "files");
  error({"-m", folder, scratch / "big", "--ids", "-c", "1"}, 2, "window");
  error({"-m", folder, scratch / "big", "--ids", "-c", "8", "--stride", "8"}, 2, "--stride 8");
  error({"-m", folder, scratch / "big", scratch / "one", "--ids", "--save-logits", scratch / "x"}, 2,
        "one file");
  write_ids(scratch / "two", {5, 6, 7});
  error({"-m", folder, scratch / "two", "--ids", "--save-logits", scratch / "no/x"}, 1, "cannot write");
  EXPECT_FALSE(fs::exists(scratch / "x"));
}

// ---- kld

// Logits of every row but the last, as the engine gives them.
std::vector<std::vector<float>> logits_of(const std::string& folder, const std::vector<int32_t>& ids) {
  DirectOptions options;
  options.engine.model = folder, options.engine.isa = "portable", options.engine.threads = 2;
  options.engine.chunk = options.max_logits = static_cast<int>(ids.size());
  Direct direct(options);
  direct.forward({ids.data(), ids.size() - 1}, WantLogits::all);
  std::vector<std::vector<float>> rows;
  for (size_t i = 0; i + 1 < ids.size(); ++i)
    rows.emplace_back(direct.model().logits(static_cast<int>(i)),
                      direct.model().logits(static_cast<int>(i)) + direct.config().vocab);
  return rows;
}
std::vector<double> log_probs(const std::vector<float>& logits) {
  std::vector<double> out;
  for (size_t i = 0; i < logits.size(); ++i)
    out.push_back(-nll_of(logits.data(), logits.size(), static_cast<int>(i)));
  return out;
}

TEST(Kld, IsTheDivergenceOfTheTwoRunsAndZeroFromItself) {
  Scratch scratch;
  SynthSpec spec = tiny_spec("kimi_linear");
  synthesize(spec, scratch / "a");
  spec.seed = 1;
  synthesize(spec, scratch / "b");
  const std::vector<int32_t> ids = some_ids(40, spec.vocab);
  write_ids(scratch / "ids", ids);
  const Json saved = weft_command({"eval", "ppl", "-m", scratch / "a", scratch / "ids", "--ids", "--isa",
                                   "portable", "-c", "64", "--save-logits", scratch / "ref", "--json"})
                         .json();
  const auto kld = [&](const std::string& model) {
    const Ran ran = weft_command({"eval", "kld", "-m", scratch / model, "--reference", scratch / "ref",
                                  "--isa", "portable", "--json"});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.json();
  };
  const auto p = logits_of(scratch / "a", ids), q = logits_of(scratch / "b", ids);
  std::vector<double> kl;
  double step = 0, bound = 0, same = 0;
  for (size_t t = 0; t < p.size(); ++t) {
    const auto lp = log_probs(p[t]), lq = log_probs(q[t]);
    double sum = 0, spread = 0;
    for (size_t i = 0; i < lp.size(); ++i) sum += std::exp(lp[i]) * (lp[i] - lq[i]);
    for (size_t i = 0; i < lp.size(); ++i) spread += std::exp(lp[i]) * std::fabs(lp[i] - lq[i] - sum);
    const auto [low, high] = std::minmax_element(p[t].begin(), p[t].end());
    step = std::max(step, static_cast<double>(*high - *low) / 65535);
    bound = std::max(bound, spread);
    kl.push_back(sum);
    same += std::max_element(p[t].begin(), p[t].end()) - p[t].begin() ==
            std::max_element(q[t].begin(), q[t].end()) - q[t].begin();
  }
  const Json other = kld("b"), self = kld("a");
  // A code is off by half a step: the divergence moves by that times the mean deviation of log p - log q, and
  // by single-precision exponentials.
  const double near = 0.5 * step * bound + 1e-5;
  double mean = 0;
  for (const double x : kl) mean += x / static_cast<double>(kl.size());
  std::sort(kl.begin(), kl.end());
  EXPECT_NEAR(other["mean_kld"].get<double>(), mean, near);
  EXPECT_NEAR(other["median_kld"].get<double>(), kl[19], near);  // 39 rows: the 20th
  EXPECT_NEAR(other["p99_kld"].get<double>(), kl[38], near);     // 99 % of 39 is the last
  EXPECT_NEAR(other["max_kld"].get<double>(), kl.back(), near);
  EXPECT_GT(mean, 100 * near) << "the models are too alike to tell a wrong sum";
  EXPECT_DOUBLE_EQ(other["same_top"].get<double>(), same / 39);
  EXPECT_EQ(other["tokens"], 39);
  EXPECT_EQ(other["reference_model"], "a");
  EXPECT_LT(self["mean_kld"].get<double>(), step * step + 1e-6);
  EXPECT_LT(self["max_kld"].get<double>(), step * step + 1e-6);
  EXPECT_DOUBLE_EQ(self["same_top"].get<double>(), 1);
  const double perplexity = saved["perplexity"].get<double>();
  EXPECT_NEAR(self["perplexity"].get<double>(), perplexity, 1e-9 * perplexity);
  EXPECT_NEAR(other["reference_perplexity"].get<double>(), perplexity, perplexity * (step + 1e-5));
  EXPECT_NE(other["perplexity"], self["perplexity"]);
  const std::string text =
      weft_command({"eval", "kld", "-m", scratch / "b", "--reference", scratch / "ref"}).out;
  for (const char* part : {"mean KL", "median KL", "same top token", "perplexity"})
    EXPECT_NE(text.find(part), text.npos) << text;
}

TEST(Kld, RefusesReferencesOfOtherModels) {
  Scratch scratch;
  const std::string model = speaking_model(scratch, "m", 1);
  std::ofstream(scratch / "text") << kText;
  const std::string reference = scratch / "ref";
  ASSERT_EQ(
      weft_command({"eval", "ppl", "-m", model, scratch / "text", "-c", "64", "--save-logits", reference})
          .code,
      0);
  const auto error = [&](const std::string& folder, const std::string& file, const std::string& part,
                         std::vector<std::string> more = {}, int code = 1) {
    std::vector<std::string> words = {"eval", "kld", "-m", folder, "--reference", file};
    words.insert(words.end(), more.begin(), more.end());
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, code) << part;
    EXPECT_NE(ran.err.find(part), ran.err.npos) << ran.err;
  };
  EXPECT_EQ(weft_command({"eval", "kld", "-m", model, "--reference", reference}).code, 0);
  error(golden_folder("kimi_k31-tiny"), reference, "vocabulary of 8192");
  error(speaking_model(scratch, "glm", 1, "glm_small"), reference, "another tokenizer");
  error(model, reference, "windows of 64", {"-c", "32"}, 2);
  error(model, scratch / "none", "cannot read");
  error(model, scratch / "text", "no reference run");
  const std::string bytes = file_bytes(reference);
  for (const size_t keep : {size_t{9}, size_t{40}, bytes.size() / 2, bytes.size() - 1}) {
    std::ofstream(scratch / "cut", std::ios::binary) << bytes.substr(0, keep);
    error(model, scratch / "cut", "cut short");
  }
}

}  // namespace
}  // namespace weft
