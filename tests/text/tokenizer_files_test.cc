// Tokenizer files that are written otherwise, ask for something weft does not do, or are damaged.
#include <gtest/gtest.h>
#include <time.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "base/check.h"
#include "base/json.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

namespace weft {
namespace {

using Specials = Tokenizer::Specials;
using Ids = std::vector<int>;
namespace fs = std::filesystem;

const std::string kGolden = WEFT_SOURCE_DIR "/tests/golden/tokenizers/";

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kSlower = 20;
#else
constexpr double kSlower = 1;
#endif

double seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "weft-tokenizer-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) fail("mkdtemp: {}", name);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  void write(const char* name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(text.data(), static_cast<std::streamsize>(text.size()));
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

std::string refusal(const std::function<void()>& load) {
  try {
    load();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

Tokenizer from_json(const Json& json, bool merges_beside = false) {
  return Tokenizer(parse_bpe_json(json.dump(), "tokenizer.json", merges_beside, true));
}

// GLM's small tokenizer after `change`; the message it is refused with.
std::string refused_json(const std::function<void(Json&)>& change, bool merges_beside = false) {
  static const Json whole = parse_json_file(kGolden + "glm_small/tokenizer.json");
  Json json = whole;
  change(json);
  return refusal([&] { from_json(json, merges_beside); });
}

TEST(TokenizerJson, MergesAsStrings) {
  const Json strings = parse_json_file(kGolden + "strings.json");
  for (const char* name : {"glm_small", "dsv_small", "gpt2"}) {
    Json json = parse_json_file(kGolden + name + "/tokenizer.json");
    for (Json& merge : json["model"]["merges"]) {
      merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    }
    const Tokenizer tokenizer = from_json(json);
    const Json cases = parse_json_file(kGolden + name + ".cases.json").at("cases");
    ASSERT_EQ(cases.size(), 338u);
    for (const Json& entry : cases) {
      const std::string text = strings.at(entry.at("i").get<size_t>()).get<std::string>();
      EXPECT_EQ(tokenizer.encode(text, Specials::all), entry.at("ids").get<Ids>()) << name << ": " << text;
    }
  }
}

TEST(TokenizerJson, ByteLevelWithItsOwnExpression) {
  // How GPT-2's file was first written: no Split, ByteLevel splits by itself.
  Json json = parse_json_file(kGolden + "gpt2/tokenizer.json");
  json["pre_tokenizer"] = Json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
  const Tokenizer tokenizer = from_json(json);
  const Json strings = parse_json_file(kGolden + "strings.json");
  const Json cases = parse_json_file(kGolden + "gpt2.cases.json").at("cases");
  ASSERT_EQ(cases.size(), 338u);
  for (const Json& entry : cases) {
    const std::string text = strings.at(entry.at("i").get<size_t>()).get<std::string>();
    EXPECT_EQ(tokenizer.split(text), entry.at("split").get<std::vector<size_t>>()) << text;
  }
}

TEST(TokenizerJson, RefusesWhatItDoesNotDo) {
  const auto expect = [](const char* part, const std::function<void(Json&)>& change) {
    EXPECT_HAS(refused_json(change), part);
  };
  EXPECT_EQ(refused_json([](Json&) {}), "accepted");
  expect("model.type", [](Json& j) { j["model"]["type"] = "Unigram"; });
  expect("model.type", [](Json& j) { j["model"].erase("type"); });
  expect("model.dropout", [](Json& j) { j["model"]["dropout"] = 0.1; });
  expect("model.byte_fallback", [](Json& j) { j["model"]["byte_fallback"] = true; });
  expect("model.end_of_word_suffix", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; });
  expect("model.continuing_subword_prefix", [](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; });
  expect("normalizer", [](Json& j) { j["normalizer"] = {{"type", "NFC"}}; });
  expect("normalizer", [](Json& j) {
    j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}};
  });
  expect("decoder.type", [](Json& j) { j["decoder"]["type"] = "Metaspace"; });
  expect("pre_tokenizer", [](Json& j) { j["pre_tokenizer"] = nullptr; });
  expect("pre_tokenizer.type", [](Json& j) { j["pre_tokenizer"] = {{"type", "Metaspace"}}; });
  const auto step = [](Json& j, size_t i) -> Json& { return j["pre_tokenizer"]["pretokenizers"][i]; };
  expect("pretokenizers[0]", [&](Json& j) {
    step(j, 0) = {{"type", "Digits"}, {"individual_digits", true}};
  });
  expect("behavior", [&](Json& j) { step(j, 0)["behavior"] = "Removed"; });
  expect("invert", [&](Json& j) { step(j, 0)["invert"] = true; });
  expect("Regex", [&](Json& j) { step(j, 0)["pattern"] = {{"String", " "}}; });
  expect("Regex", [&](Json& j) { step(j, 0)["pattern"]["Regex"] = "[\\p{L}&&[^\\p{Han}]]+"; });
  expect("Regex", [&](Json& j) { step(j, 0)["pattern"]["Regex"] = "(unclosed"; });
  expect("add_prefix_space", [&](Json& j) { step(j, 1)["add_prefix_space"] = true; });
  expect("ByteLevel", [&](Json& j) { j["pre_tokenizer"]["pretokenizers"].erase(1); });
  expect("ByteLevel", [&](Json& j) { std::swap(step(j, 0), step(j, 1)); });
}

TEST(TokenizerJson, RefusesDamage) {
  const auto expect = [](const char* part, const std::function<void(Json&)>& change) {
    EXPECT_HAS(refused_json(change), part);
  };
  const auto merges = [](Json& j) -> Json& { return j["model"]["merges"]; };
  expect("model.merges", [](Json& j) { j["model"].erase("merges"); });
  expect("model.merges", [&](Json& j) { merges(j) = nullptr; });
  expect("model.merges[7]: strings and pairs", [&](Json& j) { merges(j)[7] = "a b"; });
  expect("model.merges[1]: strings and pairs", [&](Json& j) { merges(j)[0] = "i n"; });
  expect("model.merges[3]", [&](Json& j) { merges(j)[3] = {"a"}; });
  expect("model.merges[3]", [&](Json& j) { merges(j)[3] = {"a", 5}; });
  expect("model.merges[3]", [&](Json& j) { merges(j)[3] = {"no such token", "a"}; });
  expect("model.merges[3]", [&](Json& j) { merges(j)[3] = {"a", " b"}; });  // a part that holds a space
  expect("model.merges[3]", [&](Json& j) { merges(j)[3] = {"Z", "ĠZ"}; });  // the merged token is absent
  expect("one space", [&](Json& j) { merges(j) = {"a b c"}; });
  expect("one space", [&](Json& j) { merges(j) = {"ab"}; });
  EXPECT_HAS(refused_json([&](Json& j) { merges(j) = Json::array(); }, true), "merges.txt");
  EXPECT_EQ(refused_json([&](Json& j) { merges(j) = Json::array(); }), "accepted");  // it truly has none

  const auto vocab = [](Json& j) -> Json& { return j["model"]["vocab"]; };
  expect("model.vocab", [](Json& j) { j["model"].erase("vocab"); });
  expect("model.vocab", [&](Json& j) { vocab(j) = Json::array(); });
  expect("two texts have the id 5", [&](Json& j) { vocab(j)["zzzzqqqq"] = 5; });
  expect("vocab.zzzzqqqq", [&](Json& j) { vocab(j)["zzzzqqqq"] = -1; });
  expect("vocab.zzzzqqqq", [&](Json& j) { vocab(j)["zzzzqqqq"] = 1.5; });
  expect("vocab.zzzzqqqq", [&](Json& j) { vocab(j)["zzzzqqqq"] = 4'000'000'000; });
  expect("vocab.zzzzqqqq", [&](Json& j) { vocab(j)["zzzzqqqq"] = "5"; });
  expect("empty text", [&](Json& j) { vocab(j)[""] = 9999; });
  expect("byte 0x41", [&](Json& j) { vocab(j).erase("A"), merges(j) = Json::array(); });

  const auto token = [](Json& j, size_t i) -> Json& { return j["added_tokens"][i]; };
  expect("added_tokens", [](Json& j) { j["added_tokens"] = 3; });
  expect("added_tokens[2]", [&](Json& j) { token(j, 2) = "text"; });
  expect("added_tokens[2]: content", [&](Json& j) { token(j, 2)["content"] = ""; });
  expect("added_tokens[2]: content", [&](Json& j) { token(j, 2)["content"] = token(j, 1)["content"]; });
  expect("added_tokens[2]: id", [&](Json& j) { token(j, 2)["id"] = token(j, 1)["id"]; });
  expect("added_tokens[2]: id", [&](Json& j) { token(j, 2)["id"] = 65; });
  expect("added_tokens[2]: id", [&](Json& j) { token(j, 2)["id"] = -3; });
  expect("added_tokens[2]: id", [&](Json& j) { token(j, 2)["content"] = "A"; });
  expect("added_tokens[2]: lstrip", [&](Json& j) { token(j, 2)["lstrip"] = "yes"; });
}

TEST(TokenizerJson, RefusesTruncatedText) {
  const std::string whole = read_file(kGolden + "dsv_small/tokenizer.json");
  for (size_t part = 0; part < 16; ++part) {
    const std::string_view text = std::string_view(whole).substr(0, whole.size() * part / 16);
    EXPECT_HAS(refusal([&] { parse_bpe_json(text, "dir/tokenizer.json", false, true); }),
               "dir/tokenizer.json");
  }
  for (const char* prefix : {"", "{\"model\":", "{\"added_tokens\":"}) {
    const std::string nested = prefix + std::string(200'000, '[');
    EXPECT_HAS(refusal([&] { parse_bpe_json(nested, "tokenizer.json", false, true); }), "nested");
  }
}

TEST(TokenizerJson, LoadsABigVocabularyQuickly) {
  // 150,000 entries and as many merges, each a new token: two earlier ones joined.
  Json json = parse_json_file(kGolden + "glm_small/tokenizer.json");
  Json &vocab = json["model"]["vocab"], &merges = json["model"]["merges"];
  std::vector<std::string> letters;
  for (char a = 'a'; a <= 'z'; ++a) letters.push_back(std::string(1, a));
  int next = 10'000;
  const auto add = [&](const std::string& left, const std::string& right) {
    if (vocab.contains(left + right)) return;
    vocab[left + right] = next++;
    merges.push_back({left, right});
  };
  std::vector<std::string> level = letters;
  for (int length = 2; next < 160'000; ++length) {
    std::vector<std::string> longer;
    for (const std::string& word : level) {
      for (const std::string& letter : letters) {
        if (next < 160'000) add(word, letter), longer.push_back(word + letter);
      }
    }
    level = longer;
  }
  const std::string text = json.dump();
  const double start = seconds();
  const Tokenizer tokenizer(parse_bpe_json(text, "tokenizer.json", false, true));
  EXPECT_LT(seconds() - start, 1.0 * kSlower);
  EXPECT_EQ(tokenizer.vocab_size(), 160'000);
}

const char* const kPointer =
    "version https://git-lfs.github.com/spec/v1\noid "
    "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    "\nsize 12345\n";

TEST(TokenizerFolder, NamesWhatIsMissing) {
  const Folder folder;
  std::string message = refusal([&] { Tokenizer::load(folder.path()); });
  EXPECT_HAS(message, folder.path());
  EXPECT_HAS(message, "tokenizer.json");
  EXPECT_HAS(message, "tiktoken.model");
  folder.write("tiktoken.model", read_file(kGolden + "kimi_small/tiktoken.model"));
  EXPECT_HAS(refusal([&] { Tokenizer::load(folder.path()); }), "tokenizer_config.json");
  folder.write("tokenizer_config.json", read_file(kGolden + "kimi_small/tokenizer_config.json"));
  EXPECT_EQ(Tokenizer::load(folder.path())->vocab_size(), 8192);
}

TEST(TokenizerFolder, FilesThatAreSomethingElse) {
  for (const auto& [content, part] :
       {std::pair(kPointer, "LFS"), std::pair("<!DOCTYPE html><html></html>", "HTML"),
        std::pair("", "tokenizer.json")}) {
    const Folder folder;
    folder.write("tokenizer.json", content);
    const std::string message = refusal([&] { Tokenizer::load(folder.path()); });
    EXPECT_HAS(message, "tokenizer.json");
    EXPECT_HAS(message, part);
  }
  for (const char* broken : {"tiktoken.model", "tokenizer_config.json"}) {
    const Folder folder;
    for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
      folder.write(name, name == broken ? kPointer : read_file(kGolden + "kimi_small/" + name));
    }
    const std::string message = refusal([&] { Tokenizer::load(folder.path()); });
    EXPECT_HAS(message, broken);
    EXPECT_HAS(message, "LFS");
  }
}

TEST(Tiktoken, RefusesDamage) {
  const std::string ranks = read_file(kGolden + "kimi_small/tiktoken.model");
  const std::string config = read_file(kGolden + "kimi_small/tokenizer_config.json");
  const auto load_ranks = [&](const std::string& text) {
    return refusal([&] { parse_tiktoken(text, "tiktoken.model", config, "tokenizer_config.json", true); });
  };
  EXPECT_EQ(load_ranks(ranks), "accepted");
  EXPECT_HAS(load_ranks(""), "no ranks");
  EXPECT_HAS(load_ranks(ranks + "IQ== 7936 x\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + "I*== 7936\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + "IQ= 7936\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + " 7936\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + "enp6enF6cQ==\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + "enp6enF6cQ== -1\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + "enp6enF6cQ== 99999999999\n"), "line 7937");
  EXPECT_HAS(load_ranks(ranks + "enp6enF6cQ== 4000000\n"), "missing");
  EXPECT_HAS(load_ranks(ranks + "enp6enF6cQ== 17\n"), "rank 17 is there twice");
  EXPECT_HAS(load_ranks(ranks + "IQ== 7936\n"), "two ranks have the bytes of rank 7936");
  EXPECT_HAS(load_ranks(ranks.substr(ranks.find('\n') + 1)), "missing");
  EXPECT_HAS(load_ranks("IQ== 0\n"), "no rank for the byte 0x00");
  // Cut at a line's end the ranks look whole: the names of the special tokens show that they are not.
  EXPECT_HAS(load_ranks(ranks.substr(0, ranks.rfind('\n', ranks.size() / 2) + 1)), "reserved ones");

  const auto load_config = [&](const std::function<void(Json&)>& change) {
    Json json = parse_json(config, "config");
    change(json);
    return refusal(
        [&] { parse_tiktoken(ranks, "tiktoken.model", json.dump(), "tokenizer_config.json", true); });
  };
  const auto named = [](Json& j) -> Json& { return j["added_tokens_decoder"]; };
  EXPECT_HAS(load_config([](Json& j) { j.erase("added_tokens_decoder"); }), "added_tokens_decoder");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["8192"] = named(j)["7936"]; }), "8192");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["0"] = named(j)["7936"]; }), "expected an id");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["x"] = named(j)["7936"]; }), "expected an id");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["07960"] = named(j)["7936"]; }), "expected an id");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["7960"] = named(j)["7936"]; }), "same text");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["7936"]["content"] = ""; }), "content");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["7936"]["lstrip"] = true; }), "lstrip");
  EXPECT_HAS(load_config([&](Json& j) { named(j)["7936"] = 5; }), "7936");
}

}  // namespace
}  // namespace weft
