// The engine from token ids: what requests get alone and together, limits, sessions, and how it fails.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <limits>

#include "engine/model_rig.h"
#include "rewrite.h"

namespace weft {
namespace {

using test::golden_ids;
using test::Ids;
using test::tiny_folder;
using weft::testing::Rewrite;

EngineOptions options_for(const std::string& folder, const std::string& isa = "portable") {
  EngineOptions o;
  o.model = folder;
  o.isa = isa;
  o.threads = 1;
  o.context = 256;
  o.chunk = 128;
  return o;
}

Request greedy(Ids prompt, int max_tokens) {
  Request r;
  r.prompt = std::move(prompt);
  r.max_tokens = max_tokens;
  r.sampling.temperature = 0;
  r.sampling.ignore_eos = true;
  return r;
}
Request drawn(Ids prompt, int max_tokens, uint64_t seed) {
  Request r = greedy(std::move(prompt), max_tokens);
  r.sampling.temperature = 1;
  r.sampling.seed = seed;
  return r;
}

std::vector<Result> run_all(Engine& engine, std::vector<Request> requests) {
  std::vector<Engine::Id> ids;
  for (Request& r : requests) ids.push_back(engine.submit(std::move(r)));
  while (engine.step()) {
  }
  std::vector<Result> results;
  for (const Engine::Id id : ids) results.push_back(engine.take(id).value());
  return results;
}

std::vector<std::string> usable_names(bool f32_only) {
  std::vector<std::string> names;
  for (const KernelTable* t : test::usable_tables(false))
    if (!f32_only || !t->bf16_operands) names.push_back(t->isa);
  return names;
}

// With f32 operands: in bf16 a near call flips.
class GoldenGreedy : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};
TEST_P(GoldenGreedy, ComesOut) {
  const auto& [name, isa] = GetParam();
  const std::string folder = tiny_folder(name);
  Engine engine(options_for(folder, isa));
  int cases = 0;
  const Json json = parse_json_file(folder + "/golden.json");
  for (const Json& c : json["cases"]) {
    if (!c.contains("greedy")) continue;
    const Ids want = golden_ids(folder, c["greedy"]);
    std::vector<int32_t> told;
    Request request = greedy(golden_ids(folder, c["ids"]), static_cast<int>(want.size()));
    request.on_token = [&](int32_t token, const std::string&) { told.push_back(token); };
    const Result result = engine.run(std::move(request));
    EXPECT_EQ(result.output, want) << c["name"];
    EXPECT_EQ(told, want);
    EXPECT_EQ(result.finish, Finish::length);
    EXPECT_EQ(result.error, "");
    ++cases;
  }
  EXPECT_GE(cases, 2);
}
INSTANTIATE_TEST_SUITE_P(Folders, GoldenGreedy,
                         ::testing::Combine(::testing::Values("kimi_linear-tiny", "kimi_k3-tiny-mxfp4",
                                                              "kimi_k31-tiny", "glm5_next-tiny",
                                                              "deepseek_v32-tiny", "glm_moe_dsa-tiny"),
                                            ::testing::ValuesIn(usable_names(true))));

// On every ISA; requests of all lengths share steps, wait for prompts to be read, join late and leave early.
class Together : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};
TEST_P(Together, EqualsAlone) {
  const auto& [name, isa] = GetParam();
  const std::string folder = tiny_folder(name);
  const Ids ids = golden_ids(folder, name.starts_with("kimi_k3") ? "n200.ids" : "len200.ids");
  const auto requests = [&] {
    std::vector<Request> all;
    for (const auto& [from, count, out] : std::vector<std::array<int, 3>>{
             {0, 200, 9}, {10, 3, 40}, {50, 64, 12}, {70, 65, 5}, {90, 100, 20}, {30, 1, 30}, {5, 130, 16}})
      all.push_back(drawn(Ids(ids.begin() + from, ids.begin() + from + count), out, 7 + all.size()));
    return all;
  };
  std::vector<std::vector<int32_t>> alone;
  {
    Engine engine(options_for(folder, isa));
    for (Request& r : requests()) alone.push_back(engine.run(std::move(r)).output);
  }
  for (const int sequences : {3, 7}) {
    EngineOptions o = options_for(folder, isa);
    o.sequences = sequences;
    o.threads = 2;
    Engine engine(o);
    const std::vector<Result> results = run_all(engine, requests());
    for (size_t i = 0; i < results.size(); ++i)
      EXPECT_EQ(results[i].output, alone[i]) << "request " << i << " of " << sequences << " at once";
    EXPECT_EQ(engine.caches().usage().sequences, 0);
    EXPECT_EQ(engine.caches().usage().pages_used, 0);
  }
}
INSTANTIATE_TEST_SUITE_P(Folders, Together,
                         ::testing::Combine(::testing::Values("kimi_linear-tiny", "kimi_k31-tiny",
                                                              "glm5_next-tiny", "deepseek_v32-tiny"),
                                            ::testing::ValuesIn(usable_names(false))));

class OnKimiLinear : public ::testing::Test {
 protected:
  const std::string folder_ = tiny_folder("kimi_linear-tiny");
  const Ids ids_ = golden_ids(folder_, "len200.ids");
  const Ids greedy_ = golden_ids(folder_, "len64.greedy");
  Ids prompt(int count) const { return {ids_.begin(), ids_.begin() + count}; }
  Ids known() const { return golden_ids(folder_, "len64.ids"); }
};

TEST_F(OnKimiLinear, MaxTokens) {
  Engine engine(options_for(folder_));
  for (const int n : {0, 1, 2, 24}) {
    const Result r = engine.run(greedy(known(), n));
    EXPECT_EQ(r.output, Ids(greedy_.begin(), greedy_.begin() + n));
    EXPECT_EQ(r.finish, Finish::length);
    EXPECT_EQ(r.stats.output_tokens, n);
    EXPECT_EQ(r.stats.prompt_tokens, 64);
  }
}

TEST_F(OnKimiLinear, StopIds) {
  Engine engine(options_for(folder_));
  const auto first =
      static_cast<int>(std::find(greedy_.begin(), greedy_.end(), greedy_[5]) - greedy_.begin());
  Request r = greedy(known(), 24);
  r.stop_ids = {greedy_[5]};
  const Result result = engine.run(std::move(r));
  EXPECT_EQ(result.finish, Finish::stop);
  EXPECT_EQ(result.output, Ids(greedy_.begin(), greedy_.begin() + first + 1));
}

// The model's own end token, made the likeliest.
TEST_F(OnKimiLinear, EndTokenAndIgnoreEos) {
  Engine engine(options_for(folder_));
  Request r = greedy(known(), 4);
  r.sampling.ignore_eos = false;
  r.sampling.logit_bias[2] = 100;
  const Result stopped = engine.run(Request(r));
  EXPECT_EQ(stopped.finish, Finish::stop);
  EXPECT_EQ(stopped.output, Ids({2}));
  r.sampling.ignore_eos = true;
  const Result going = engine.run(std::move(r));
  EXPECT_EQ(going.finish, Finish::length);
  EXPECT_EQ(going.output, Ids({2, 2, 2, 2}));
}

TEST_F(OnKimiLinear, SeedsReproduce) {
  Engine engine(options_for(folder_));
  const Ids one = engine.run(drawn(known(), 30, 1)).output, two = engine.run(drawn(known(), 30, 2)).output;
  EXPECT_NE(one, two);
  EXPECT_EQ(engine.run(drawn(known(), 30, 1)).output, one);
  Engine other(options_for(folder_));
  EXPECT_EQ(other.run(drawn(known(), 30, 2)).output, two);
}

TEST_F(OnKimiLinear, CancelStopsOneAlone) {
  EngineOptions o = options_for(folder_);
  o.sequences = 2;
  Engine engine(o);
  int32_t told = 0;
  Request watched = greedy(prompt(30), 100);
  watched.on_token = [&](int32_t, const std::string&) { ++told; };
  const Engine::Id gone = engine.submit(std::move(watched)), stays = engine.submit(greedy(known(), 24)),
                   waits = engine.submit(greedy(prompt(9), 3)), never = engine.submit(greedy(prompt(5), 3));
  for (int i = 0; i < 4; ++i) engine.step();
  engine.cancel(gone);
  engine.cancel(never);
  engine.cancel(12345);
  const int32_t before = told;
  while (engine.step()) {
  }
  const Result cancelled = engine.take(gone).value();
  EXPECT_EQ(cancelled.finish, Finish::cancelled);
  EXPECT_EQ(static_cast<int32_t>(cancelled.output.size()), before);
  EXPECT_EQ(told, before);
  EXPECT_EQ(engine.take(stays).value().output, greedy_);
  EXPECT_EQ(engine.take(waits).value().output.size(), 3u);
  const Result unstarted = engine.take(never).value();
  EXPECT_EQ(unstarted.finish, Finish::cancelled);
  EXPECT_TRUE(unstarted.output.empty());
  EXPECT_EQ(engine.caches().usage().sequences, 0);
  EXPECT_FALSE(engine.take(gone).has_value());
}

TEST_F(OnKimiLinear, ContextLimits) {
  EngineOptions o = options_for(folder_);
  o.context = 64;
  Engine engine(o);
  for (const int n : {62, 63}) {
    for (const int most : {-1, 8}) {
      const Result r = engine.run(greedy(prompt(n), most));
      EXPECT_EQ(r.stats.prompt_tokens, n);
      EXPECT_EQ(static_cast<int>(r.output.size()), 64 - n);
      EXPECT_EQ(r.finish, Finish::length);
    }
  }
  for (const int n : {64, 65}) {
    const std::string said = error_of([&] { engine.run(greedy(prompt(n), 8)); });
    EXPECT_SAYS(said, std::to_string(n));
    EXPECT_SAYS(said, "64");
    EXPECT_SAYS(said, "context");
  }
  const Result after = engine.run(greedy(prompt(63), 1));
  EXPECT_EQ(after.output.size(), 1u);
  o.context = 1 << 30;
  EXPECT_SAYS(error_of([&] { Engine e(o); }), "1048576");
}

TEST_F(OnKimiLinear, BadRequestsAreRefusedAndChangeNothing) {
  Engine engine(options_for(folder_));
  const auto refused = [&](auto&& change, const char* says) {
    Request r = greedy(known(), 4);
    change(r);
    EXPECT_SAYS(error_of([&] { engine.submit(std::move(r)); }), says);
  };
  refused([](Request& r) { r.prompt.clear(); }, "empty");
  refused([](Request& r) { r.prompt[3] = 131; }, "131");
  refused([](Request& r) { r.prompt[3] = -1; }, "-1");
  refused([](Request& r) { r.stop_ids = {131}; }, "131");
  refused([](Request& r) { r.max_tokens = -2; }, "-2");
  refused([](Request& r) { r.sampling.top_p = 1.5; }, "top_p");
  EXPECT_FALSE(engine.step());
  Request edge = greedy({0, 130}, 1);
  edge.stop_ids = {130};
  EXPECT_EQ(engine.run(std::move(edge)).output.size(), 1u);
}

class Sessions : public ::testing::TestWithParam<std::string> {};
TEST_P(Sessions, ReuseWhatTheyHold) {
  const std::string folder = tiny_folder(GetParam());
  const Ids ids = golden_ids(folder, GetParam().starts_with("kimi_k3") ? "n200.ids" : "len200.ids");
  EngineOptions o = options_for(folder);
  o.sequences = 2;
  Engine engine(o), other(options_for(folder));
  Session session = engine.new_session();
  const auto ask = [&](Ids prompt, int tokens) {
    const Ids want = other.run(greedy(Ids(prompt), tokens)).output;
    Request r = greedy(std::move(prompt), tokens);
    r.session = &session;
    const Result result = engine.run(std::move(r));
    EXPECT_EQ(result.output, want);
    return result;
  };
  Ids talk(ids.begin(), ids.begin() + 70);
  Result first = ask(talk, 10);
  EXPECT_EQ(first.stats.reused_tokens, 0);
  EXPECT_EQ(session.sequence.position(), static_cast<int>(session.tokens.size()));
  Ids longer = talk;
  longer.insert(longer.end(), first.output.begin(), first.output.end());
  longer.insert(longer.end(), ids.begin() + 100, ids.begin() + 120);
  EXPECT_EQ(ask(longer, 6).stats.reused_tokens, 79);  // all but the last token, which no step has read
  Ids edited = talk;  // the answer is dropped: back to the end of the first prompt
  edited.insert(edited.end(), ids.begin() + 150, ids.begin() + 160);
  EXPECT_EQ(ask(edited, 6).stats.reused_tokens, 70);
  ask(Ids(ids.begin() + 3, ids.begin() + 60), 4);  // another talk altogether
  ask(talk, 4);
  EXPECT_GT(ask(talk, 4).stats.reused_tokens, -1);  // the same prompt again: at least one token is computed
  EXPECT_EQ(engine.caches().usage().sequences, 1);
}
INSTANTIATE_TEST_SUITE_P(Folders, Sessions,
                         ::testing::Values("kimi_linear-tiny", "kimi_k31-tiny", "glm5_next-tiny",
                                           "deepseek_v32-tiny"));

TEST_F(OnKimiLinear, OneRequestOfASessionAtATime) {
  EngineOptions o = options_for(folder_);
  o.sequences = 2;
  Engine engine(o);
  Session session = engine.new_session();
  std::vector<Request> both;
  for (int i = 0; i < 2; ++i) {
    both.push_back(greedy(known(), 24));
    both.back().session = &session;
  }
  const std::vector<Result> results = run_all(engine, std::move(both));
  EXPECT_EQ(results[0].output, greedy_);
  EXPECT_EQ(results[1].output, greedy_);
}

// Idle sessions hold every sequence: a request that needs one more fails with the reason instead of waiting
// for ever.
TEST_F(OnKimiLinear, SessionsThatHoldAllSequences) {
  EngineOptions o = options_for(folder_);
  Engine engine(o);
  Session session = engine.new_session();
  Request r = greedy(known(), 3);
  r.session = &session;
  EXPECT_EQ(engine.run(std::move(r)).output.size(), 3u);
  const Result refused = engine.run(greedy(known(), 3));
  EXPECT_EQ(refused.finish, Finish::error);
  EXPECT_SAYS(refused.error, "session");
  session.sequence.release();
  EXPECT_EQ(engine.run(greedy(known(), 24)).output, greedy_);
}

TEST_F(OnKimiLinear, NanInAWeightNamesItsLayer) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto said = [&](const std::string& tensor) {
    Rewrite copy(folder_);
    auto& stored = copy.tensor(tensor);
    std::vector<float> values = Rewrite::values(stored);
    values[values.size() / 2] = nan;
    Rewrite::set_values(stored, values, stored.dtype);
    TemporaryFolder folder;
    copy.write(folder.path());
    Engine engine(options_for(folder.path()));
    const Result r = engine.run(greedy(known(), 4));
    EXPECT_EQ(r.finish, Finish::error);
    EXPECT_TRUE(r.output.empty());
    EXPECT_EQ(engine.caches().usage().sequences, 0);
    return r.error;
  };
  EXPECT_SAYS(said("layers.3.self_attn.o_proj.weight"), "first NaN or Inf in layer 3, attention");
  EXPECT_SAYS(said("layers.2.self_attn.kv_b_proj.weight"), "layer 2, attention");
  EXPECT_SAYS(said("layers.0.mlp.down_proj.weight"), "layer 0, feed-forward");
  EXPECT_SAYS(said("layers.4.block_sparse_moe.shared_experts.up_proj.weight"), "layer 4, feed-forward");
  EXPECT_SAYS(said("lm_head.weight"), "the output head");
}

// A NaN that one token's row brings in: its request fails, its company does not notice.
TEST_F(OnKimiLinear, AFailedRequestFailsAlone) {
  Rewrite copy(folder_);
  auto& table = copy.tensor("embed_tokens.weight");
  std::vector<float> values = Rewrite::values(table);
  int32_t bad = 0;
  const auto used = [&](int32_t id) {
    const Ids k = known();
    return std::count(k.begin(), k.end(), id) + std::count(greedy_.begin(), greedy_.end(), id) > 0;
  };
  while (used(bad)) ++bad;
  values[static_cast<size_t>(bad) * 56 + 20] = std::numeric_limits<float>::infinity();
  Rewrite::set_values(table, values, table.dtype);
  TemporaryFolder folder;
  copy.write(folder.path());
  for (const std::string& isa : usable_names(false)) {
    EngineOptions o = options_for(folder.path(), isa);
    o.sequences = 3;
    Engine engine(o);
    const Ids alone = engine.run(greedy(known(), 24)).output;
    Ids poisoned = prompt(40);
    poisoned[17] = bad;
    const std::vector<Result> r = run_all(engine, [&] {
      std::vector<Request> all;
      all.push_back(greedy(poisoned, 5));
      all.push_back(greedy(known(), 24));
      all.push_back(greedy({bad}, 5));
      return all;
    }());
    EXPECT_EQ(r[0].finish, Finish::error) << isa;
    EXPECT_SAYS(r[0].error, "layer");  // the last row gets it through a token mixer
    EXPECT_SAYS(r[2].error, "the embedding");
    EXPECT_EQ(r[1].output, alone) << isa;
    EXPECT_EQ(engine.run(greedy(known(), 24)).output, alone)
        << "in the pages and slots of the failed ones, " << isa;
  }
}

TEST_F(OnKimiLinear, MemoryIsRefusedWithTheNumbers) {
  EngineOptions o = options_for(folder_);
  o.context = 1 << 20;
  o.sequences = 100000;
  const std::string said = error_of([&] { Engine engine(o); });
  EXPECT_SAYS(said, "needs");
  EXPECT_SAYS(said, "GiB of memory is available");
  EXPECT_SAYS(said, "-c");
}

}  // namespace
}  // namespace weft
