// Needles: documents, judging, the table; and questions that share the reading of a document.
#include <set>
#include <sstream>

#include "app/answer.h"
#include "app/heat_map.h"
#include "app/needle.h"
#include "app/questions.h"
#include "tools_support.h"

namespace weft {
namespace {

using namespace test;

int words_in(std::string_view text) {
  std::istringstream in{std::string(text)};
  int n = 0;
  for (std::string word; in >> word;) ++n;
  return n;
}

std::string prose(int sentences) {
  std::string text;
  for (int i = 0; i < sentences; ++i)
    text += fmt::format("Sentence {} says nothing about codes of any kind.{}", i, i % 7 == 6 ? "\n\n" : " ");
  return text;
}

std::string speaking_model(const Scratch& scratch, const std::string& family = "kimi_k31") {
  SynthSpec spec = tiny_spec(family);
  spec.vocab = 8192;
  synthesize(spec, scratch / family, std::string(WEFT_SOURCE_DIR) + "/tests/golden/tokenizers/kimi_small");
  return scratch / family;
}

TEST(Needle, UsesTheTrainersWords) {
  std::string expected;
  const auto add = [&](const char* name, std::span<const char* const> words) {
    expected += name;
    for (const char* word : words) expected += std::string(" ") + word;
    expected += "\n";
  };
  add("adjectives:", needle_adjectives());
  add("nouns:", needle_nouns());
  EXPECT_EQ(file_bytes(std::string(WEFT_SOURCE_DIR) + "/tools/train/words.txt"), expected);
}

TEST(Needle, FactsAreDistinctAndRepeatable) {
  Draw a(5), b(5), c(6);
  const std::vector<Fact> facts = draw_facts(500, a);
  std::set<std::string> keys, values;
  for (const Fact& f : facts) {
    keys.insert(f.key), values.insert(f.value);
    EXPECT_EQ(f.value.size(), 6u);
    EXPECT_EQ(f.sentence(), "The secret code of " + f.key + " is " + f.value + ".");
    EXPECT_EQ(f.question(), "What is the secret code of " + f.key + "?");
  }
  EXPECT_EQ(keys.size(), 500u);
  EXPECT_EQ(values.size(), 500u);
  EXPECT_EQ(draw_facts(500, b)[499].sentence(), facts[499].sentence());
  EXPECT_NE(draw_facts(500, c)[499].sentence(), facts[499].sentence());
  EXPECT_THROW(draw_facts(0, a), UsageError);
  EXPECT_THROW(draw_facts(48 * 48 + 1, a), UsageError);
}

TEST(Needle, PutsFactsBetweenSentencesAtTheirDepths) {
  const Haystack haystack(prose(300), words_in);
  EXPECT_EQ(haystack.sentences(), 300u);
  const std::vector<int> depths = {0, 50, 100};
  std::set<std::string> documents;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Draw draw(seed);
    const std::vector<Fact> facts = draw_facts(6, draw);
    const NeedleDocument d = haystack.document(1000, depths, facts, draw);
    documents.insert(d.text);
    EXPECT_LE(words_in(d.text), 1000);
    EXPECT_GE(words_in(d.text), 1000 - 9);  // a sentence less
    for (size_t f = 0; f < facts.size(); ++f) {
      const size_t at = d.text.find(facts[f].sentence());
      ASSERT_NE(at, d.text.npos);
      EXPECT_EQ(d.text.find(facts[f].sentence(), at + 1), d.text.npos);
      // Whole sentences on both sides.
      EXPECT_TRUE(at == 0 || d.text.substr(0, at).ends_with(". ") || d.text[at - 1] == '\n')
          << d.text.substr(0, at);
      const std::string after = d.text.substr(at + facts[f].sentence().size());
      EXPECT_TRUE(after.empty() || after.starts_with(" Sentence") || after.starts_with(" The secret"))
          << after;
      if (f < depths.size()) {
        EXPECT_NEAR(static_cast<double>(words_in(d.text.substr(0, at))) / words_in(d.text), depths[f] / 100.0,
                    0.06);
      }
    }
  }
  EXPECT_EQ(documents.size(), 20u);
  Draw draw(1);
  // A haystack too short for the length is read again from its beginning.
  const Haystack few(prose(5), words_in);
  EXPECT_GE(words_in(few.document(1000, {50}, draw_facts(1, draw), draw).text), 985);
  EXPECT_THROW(haystack.document(30, {50}, draw_facts(8, draw), draw), UsageError);
  EXPECT_THROW(Haystack("no end", words_in), Error);
}

TEST(Needle, JudgesByTheValueAlone) {
  const std::vector<Fact> facts = {{"amber anchor", "123456"}, {"blue bell", "654321"}};
  EXPECT_EQ(judge("The secret code of amber anchor is 123456.", facts[0], facts), Verdict::right);
  EXPECT_EQ(judge("123456, I say: 123456", facts[0], facts), Verdict::right);
  EXPECT_EQ(judge("123456", facts[0], facts), Verdict::right);
  EXPECT_EQ(judge("It is 654321.", facts[0], facts), Verdict::other_fact);
  EXPECT_EQ(judge("123456 or 654321", facts[0], facts), Verdict::other_fact);  // naming all is no answer
  EXPECT_EQ(judge("123456 or 111111", facts[0], facts), Verdict::wrong);
  EXPECT_EQ(judge("1234567", facts[0], facts), Verdict::wrong);
  EXPECT_EQ(judge("", facts[0], facts), Verdict::wrong);
}

TEST(Needle, RunsTheGrid) {
  Scratch scratch;
  const std::string model = speaking_model(scratch);
  fs::create_directories(model + "/eval");
  std::ofstream(model + "/eval/haystack.txt") << prose(100);
  const std::vector<std::string> words = {"eval",     "needle",   "-m",      model, "--lengths", "300,420",
                                          "--depths", "0,40,100", "--facts", "4",   "--trials",  "2",
                                          "--seed",   "3",        "-n",      "6",   "--json"};
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more.begin(), more.end());
    const Ran ran = weft_command(all);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.json();
  };
  const Json j = run({"--svg", scratch / "map.svg"});
  EXPECT_EQ(j["lengths"], Json::array({300, 420}));
  EXPECT_EQ(j["depths"], Json::array({0, 40, 100}));
  EXPECT_EQ(j["facts"], 4);
  EXPECT_EQ(j["trials"], 2);
  EXPECT_EQ(j["guess_rate"], 0.25);
  EXPECT_EQ(j["questions"], 12);
  ASSERT_EQ(j["accuracy"].size(), 2u);
  for (const Json& row : j["accuracy"]) EXPECT_EQ(row, Json::array({0, 0, 0}));  // random weights
  EXPECT_EQ(j["mean_accuracy"], 0);
  EXPECT_EQ(j["failures"].size(), 12u);
  EXPECT_LE(j["longest_prompt"].get<int>(), 420);
  EXPECT_GE(j["longest_prompt"].get<int>(), 380);
  EXPECT_EQ(j["answer_tokens"], 12 * 6);
  // Four documents are read, not twelve.
  EXPECT_LT(j["read_tokens"].get<int>(), j["prompt_tokens"].get<int>() / 2);
  const std::string picture = file_bytes(scratch / "map.svg");
  for (const char* part : {"<svg ", ">420<", ">40 %<", "guessing 25.0 %", "</svg>"})
    EXPECT_NE(picture.find(part), picture.npos) << picture;

  // Neither company nor the sharing of a document's reading changes an answer.
  const Json alone = run({"--parallel", "1", "-b", "64"});
  EXPECT_EQ(alone["failures"].size(), 12u);
  std::set<std::string> a, b;
  for (const Json& f : j["failures"]) a.insert(f.dump());
  for (const Json& f : alone["failures"]) b.insert(f.dump());
  EXPECT_EQ(a, b);
  // Fewer facts than depths: a document for each.
  const Json single = run({"--facts", "1"});
  EXPECT_EQ(single["guess_rate"], 1.0);
  EXPECT_EQ(single["questions"], 12);
  EXPECT_EQ(single["read_tokens"], single["prompt_tokens"]);

  std::vector<std::string> plain(words.begin(), words.end() - 1);
  const std::string table = weft_command(plain).out;
  for (const char* part : {"0.0 % (0/2)", "0.0 % (0/6)", "guessing gives 25.0 %", "300 tokens"})
    EXPECT_NE(table.find(part), table.npos) << table;
}

TEST(Needle, SaysWhatIsWrong) {
  Scratch scratch;
  const std::string model = speaking_model(scratch);
  const auto error = [&](std::vector<std::string> words, int code, const std::string& part) {
    words.insert(words.begin(), {"eval", "needle", "-m", model});
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_NE(ran.err.find(part), ran.err.npos) << ran.err;
  };
  error({}, 1, "--haystack FILE");
  std::ofstream(scratch / "hay") << prose(50);
  error({"--haystack", scratch / "hay", "--facts", "0"}, 2, "--facts 0");
  error({"--haystack", scratch / "hay", "--depths", "101"}, 2, "--depths 101");
  error({"--haystack", scratch / "hay", "--lengths", "8"}, 2, "--lengths 8");
  error({"--haystack", scratch / "hay", "--lengths", "100", "--facts", "40"}, 2, "facts");
  error({"--haystack", scratch / "hay", "-c", "100"}, 2, "-c");
  error({"--haystack", scratch / "hay", "--trials", "0"}, 2, "--trials");
  error({"--haystack", scratch / "none"}, 1, "cannot read");
  EXPECT_EQ(weft_command({"eval"}).code, 2);
}

// ---- questions

struct Asked {
  std::string content, reasoning;
  int output = 0, reused = 0;
  bool operator==(const Asked& o) const {
    return content == o.content && reasoning == o.reasoning && output == o.output;
  }
};
std::vector<Asked> ask_all(const std::string& model, const std::string& document,
                           const std::vector<std::string>& asked) {
  EngineOptions options;
  options.model = model, options.isa = "portable", options.threads = 2, options.context = 1024;
  Engine engine(options);
  Questions questions(engine, ChatRequest(), document, asked, 12);
  std::vector<Asked> out;
  while (!questions.done()) {
    questions.submit();
    int index = -1;
    while (questions.running()) {
      engine.step();
      index = questions.poll();
    }
    if (index < 0) continue;
    EXPECT_EQ(index, static_cast<int>(out.size()));
    const Answer& a = questions.answer(index);
    EXPECT_EQ(a.error, "");
    out.push_back({a.content, a.reasoning, a.stats.output_tokens, a.stats.reused_tokens});
  }
  return out;
}

TEST(Questions, ShareTheReadingAndNothingElse) {
  for (const char* family : {"kimi_k31", "glm_moe_dsa"}) {
    Scratch scratch;
    const std::string model = speaking_model(scratch, family);
    const std::vector<std::string> asked = {"What is the code?", "Who says so, and why?",
                                            "What is the code?"};
    const std::vector<Asked> together = ask_all(model, prose(30), asked);
    ASSERT_EQ(together.size(), 3u);
    EXPECT_EQ(together[0], together[2]) << family;
    EXPECT_NE(together[0].content + together[0].reasoning, together[1].content + together[1].reasoning);
    for (size_t i = 0; i < asked.size(); ++i) {
      const std::vector<Asked> alone = ask_all(model, prose(30), {asked[i]});
      EXPECT_EQ(alone[0], together[i]) << family;
      EXPECT_EQ(alone[0].reused, 0);
      EXPECT_GE(together[i].reused, 256);
    }
  }
}

TEST(Ask, AnswersAndSaysWhatItCost) {
  Scratch scratch;
  const std::string model = speaking_model(scratch);
  std::ofstream(scratch / "text") << prose(30) << "\n";
  const Ran ran = weft_command(
      {"ask", "-m", model, "-f", scratch / "text", "-q", "What is it?", "-q", "Why?", "-n", "8"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_NE(ran.out.find("> What is it?\n"), ran.out.npos) << ran.out;
  EXPECT_NE(ran.out.find("\n> Why?\n"), ran.out.npos) << ran.out;
  for (const char* part : {"document  ", "answer 1  first token after", "answer 2  ", "caches    ", "16 of ",
                           "rows (", "in each of 1 DSA layers, none in 3 KDA layers"})
    EXPECT_NE(ran.err.find(part), ran.err.npos) << ran.err;
  const Ran dense =
      weft_command({"ask", "-m", model, "-f", scratch / "text", "-q", "Why?", "-n", "8", "--dsa=dense"});
  EXPECT_NE(dense.err.find("all "), dense.err.npos) << dense.err;
  const auto error = [&](std::vector<std::string> words, int code, const std::string& part) {
    words.insert(words.begin(), {"ask", "-m", model});
    const Ran failed = weft_command(words);
    EXPECT_EQ(failed.code, code) << failed.err;
    EXPECT_NE(failed.err.find(part), failed.err.npos) << failed.err;
  };
  error({"-f", scratch / "text"}, 2, "question");
  error({"-q", "Why?"}, 2, "file");
  error({"-f", scratch / "none", "-q", "Why?"}, 1, "cannot read");
  std::ofstream(scratch / "empty") << "\n";
  error({"-f", scratch / "empty", "-q", "Why?"}, 2, "no text");
  error({"-f", scratch / "text", "-q", "Why?", "-c", "64"}, 2, "raise -c");
}

// ---- overlap

TEST(Overlap, OfASettingWithItselfAndWithTheLastTokens) {
  Scratch scratch;
  for (const char* name : {"kimi_k31-tiny", "glm5_next-tiny"}) {
    const std::string folder = golden_folder(name);
    std::ofstream file(scratch / "ids");
    for (int i = 0; i < 150; ++i) file << (i * 37 + i * i * 11) % 139 << ' ';
    file.close();
    const auto run = [&](std::vector<std::string> more) {
      std::vector<std::string> words = {
          "eval", "overlap", "-m", folder, scratch / "ids", "--ids", "--json", "-b", "64", "--rows", "9"};
      words.insert(words.end(), more.begin(), more.end());
      const Ran ran = weft_command(words);
      EXPECT_EQ(ran.code, 0) << ran.err;
      return ran.json();
    };
    const Json self = run({});
    ASSERT_GT(self["layers"].size(), 0u);
    for (const Json& layer : self["layers"]) {
      EXPECT_EQ(layer["mean_overlap"], 1) << name;
      EXPECT_EQ(layer["min_overlap"], 1);
      EXPECT_EQ(layer["mean_mass"], layer["other_mean_mass"]);
      EXPECT_GT(layer["min_mass"].get<double>(), 0);
      EXPECT_LT(layer["mean_mass"].get<double>(), 1);
      EXPECT_LE(layer["min_mass"], layer["mean_mass"]);
      EXPECT_EQ(layer["mass_rows"], 9);
      EXPECT_GT(layer["rows"].get<int>(), 120);
    }
    const Json recent = run({"--against", "--dsa=recent --isa portable"});
    for (size_t l = 0; l < self["layers"].size(); ++l) {
      const Json &mine = self["layers"][l], &other = recent["layers"][l];
      EXPECT_LT(other["mean_overlap"].get<double>(), 0.9);
      EXPECT_LE(other["min_overlap"], other["mean_overlap"]);
      EXPECT_EQ(other["mean_mass"], mine["mean_mass"]);
      EXPECT_NE(other["other_mean_mass"], mine["mean_mass"]);
      EXPECT_LT(other["other_mean_mass"].get<double>(), 1);
    }
    // The other way round the roles change, not what recent lists hold under the same hidden states.
    const Json back = run({"--dsa=recent", "--against", "--dsa=sparse"});
    EXPECT_LT(back["layers"][0]["mean_overlap"].get<double>(), 0.9);
  }
}

TEST(Overlap, SaysWhatIsWrong) {
  Scratch scratch;
  std::ofstream(scratch / "ids") << "1 2 3";
  std::ofstream long_file(scratch / "long");
  for (int i = 0; i < 60; ++i) long_file << i << ' ';
  long_file.close();
  const auto error = [&](const std::string& name, std::vector<std::string> more, int code,
                         const std::string& part) {
    std::vector<std::string> words = {"eval", "overlap", "-m", golden_folder(name), "--ids"};
    words.insert(words.end(), more.begin(), more.end());
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_NE(ran.err.find(part), ran.err.npos) << ran.err;
  };
  error("kimi_k31-tiny", {scratch / "ids"}, 1, "give more than 16");
  error("kimi_linear-tiny", {scratch / "long"}, 1, "no indexer");
  error("kimi_k31-tiny", {scratch / "long", "--against", "--dsa=dense"}, 2, "selects nothing");
  error("kimi_k31-tiny", {scratch / "long", "--dsa", "dense"}, 2, "selects nothing");
  error("kimi_k31-tiny", {scratch / "long", "--against", "--nonsense"}, 2, "--against");
  error("kimi_k31-tiny", {scratch / "long", "--dsa", "nothing"}, 2, "nothing");
}

}  // namespace
}  // namespace weft
