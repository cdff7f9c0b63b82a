// --dsa=dense and --dsa=recent: against the sparse model made to do the same.
#include "engine/direct.h"
#include "engine/model_rig.h"
#include "rewrite.h"

namespace weft {
namespace {

using test::Ids;
using test::Logits;
using weft::testing::Rewrite;

const std::vector<std::string> kFolders = {"kimi_k31-tiny", "deepseek_v32-tiny", "glm_moe_dsa-tiny",
                                           "glm5_next-tiny"};

Ids some_ids(int vocab) {
  Ids ids;
  uint32_t x = 7;
  for (int i = 0; i < 150; ++i)
    ids.push_back(static_cast<int32_t>((x = x * 1664525 + 1013904223) >> 16) % vocab);
  return ids;
}

struct Ran {
  Logits logits;
  int layers = 0, width = 0;
  std::vector<std::vector<int32_t>> seen;
};
Ran run(const std::string& folder, const std::string& isa, DsaMode mode, MlaForm form,
        const std::vector<std::vector<int32_t>>* forced = nullptr) {
  DirectOptions options;
  options.engine.model = folder, options.engine.isa = isa, options.engine.threads = 2,
  options.engine.context = 256;
  options.engine.chunk = 64, options.engine.dsa = mode, options.engine.mla = form;
  options.max_logits = 64;
  Direct direct(options);
  const Ids ids = some_ids(direct.config().vocab);
  Ran ran;
  ran.layers = direct.model().parts().dsa_layers, ran.width = direct.model().parts().selection_width;
  ran.seen.assign(ran.layers, std::vector<int32_t>(ids.size() * ran.width, -2));
  const size_t vocab = direct.config().vocab;
  for (size_t at = 0; at < ids.size(); at += 64) {
    const size_t n = std::min<size_t>(64, ids.size() - at);
    std::vector<int32_t*> see;
    std::vector<const int32_t*> force;
    for (auto& layer : ran.seen) see.push_back(layer.data() + at * ran.width);
    if (forced)
      for (const auto& layer : *forced) force.push_back(layer.data() + at * ran.width);
    direct.forward({ids.data() + at, n}, WantLogits::all, [&](StepHeader& h) {
      h.seen_selection = see.data();
      if (forced) h.forced_selection = force.data();
    });
    for (size_t i = 0; i < n; ++i)
      ran.logits.insert(ran.logits.end(), direct.model().logits(static_cast<int>(i)),
                        direct.model().logits(static_cast<int>(i)) + vocab);
  }
  return ran;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : test::usable_tables(false)) names.push_back(table->isa);
  return names;
}

// The most recent tokens, as many as a list holds, worked out here.
std::vector<int32_t> recent_lists(int tokens, int width) {
  std::vector<int32_t> lists;
  for (int t = 0; t < tokens; ++t) {
    const int n = std::min(width, t + 1);
    for (int i = 0; i < width; ++i) lists.push_back(i < n ? t + 1 - n + i : -1);
  }
  return lists;
}

TEST(Modes, RecentIsTheSparseModelWithTheLastTokensForced) {
  for (const std::string& name : kFolders)
    for (const std::string& isa : isas()) {
      const std::string folder = test::tiny_folder(name);
      const Ran recent = run(folder, isa, DsaMode::recent, MlaForm::automatic);
      const std::vector<std::vector<int32_t>> lists(recent.layers, recent_lists(150, recent.width));
      EXPECT_EQ(recent.seen, lists) << name << " " << isa;
      const Ran sparse = run(folder, isa, DsaMode::sparse, MlaForm::automatic, &lists);
      ASSERT_EQ(sparse.layers, recent.layers);
      ASSERT_GT(recent.layers, 0);
      EXPECT_NE(sparse.seen, lists) << name << ": the indexer chooses the last tokens, so nothing is tested";
      EXPECT_TRUE(test::same_bits(recent.logits, sparse.logits, recent.logits.size() / 150))
          << name << " " << isa;
    }
}

// A list of everything is the whole prefix, so the sparse model with a top-k beyond the prompt computes the
// same.
TEST(Modes, DenseIsTheSparseModelThatMaySelectAll) {
  for (const std::string& name : kFolders)
    for (const std::string& isa : isas())
      for (const MlaForm form : {MlaForm::absorbed, MlaForm::expanded}) {
        const Ran dense = run(test::tiny_folder(name), isa, DsaMode::dense, form);
        EXPECT_EQ(dense.layers, 0);
        Rewrite wide(test::tiny_folder(name));
        const std::string text = wide.config.dump();
        const std::string key = "\"index_topk\":";
        const size_t at = text.find(key);
        ASSERT_NE(at, text.npos);
        size_t end = at + key.size();
        while (text[end] >= '0' && text[end] <= '9') ++end;
        wide.config = nlohmann::json::parse(text.substr(0, at + key.size()) + "512" + text.substr(end));
        TemporaryFolder folder;
        wide.write(folder.path());
        const Ran all = run(folder.path(), isa, DsaMode::sparse, form);
        EXPECT_GT(all.layers, 0);
        EXPECT_TRUE(test::same_bits(dense.logits, all.logits, dense.logits.size() / 150))
            << name << " " << isa;
        const Ran sparse = run(test::tiny_folder(name), isa, DsaMode::sparse, form);
        EXPECT_GT(test::largest_difference(dense.logits, sparse.logits), 1e-3) << name;
      }
}

TEST(Modes, NeitherKeepsIndexKeys) {
  for (const DsaMode mode : {DsaMode::dense, DsaMode::recent}) {
    EngineOptions options;
    options.model = test::tiny_folder("kimi_k31-tiny"), options.dsa = mode, options.isa = "portable";
    const Model model(options.model, choose_kernels("portable", cpu_features()), build_options(options));
    EXPECT_EQ(model.parts().caches.index_bytes, 0u);
    EXPECT_GT(model.parts().caches.latent_bytes, 0u);
  }
}

}  // namespace
}  // namespace weft
