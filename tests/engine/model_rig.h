// A model with its caches and a batch, driven step by step: what whole-model tests need below the engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "engine/batch.h"
#include "kernels/dispatch.h"
#include "model/model.h"
#include "safetensors_lite.h"

namespace weft {

extern const KernelTable kernel_table_amxmodel;

namespace test {

// Usable tables of this machine; with_model adds the amx kernels over the software tile model.
inline std::vector<const KernelTable*> usable_tables(bool with_model) {
  std::vector<const KernelTable*> usable;
  for (const IsaChoice& choice : isa_choices(cpu_features())) {
    if (choice.missing.empty())
      usable.push_back(choice.table);
    else
      std::fprintf(stderr, "not tested here: %s: %s\n", choice.name.c_str(), choice.missing.c_str());
  }
  if (with_model && cpu_features().no_avx512.empty()) usable.push_back(&kernel_table_amxmodel);
  return usable;
}

// "portable", "amx", ...; the model of the tile unit bears the name of the unit it stands for.
inline std::string table_name(const KernelTable* table) {
  return table == &kernel_table_amxmodel ? "amxmodel" : table->isa;
}

inline std::string tiny_folder(const std::string& name) {
  return std::string(WEFT_SOURCE_DIR) + "/tests/golden/" + name;
}

// The larger folders with the real kernel dims do not come with the sources; empty when they are not beside
// them.
inline std::string kernel_folder(const std::string& name) {
  const std::string path = std::string(WEFT_SOURCE_DIR) + "/../shared/golden/" + name;
  return std::filesystem::exists(path + "/golden.json") ? path : "";
}

// Recorded tensors of a golden folder.
inline std::vector<int32_t> golden_ids(const std::string& folder, const std::string& tensor) {
  return weft::testing::LiteSafetensors(folder + "/golden.safetensors").get<int32_t>(tensor);
}

using Ids = std::vector<int32_t>;
using Logits = std::vector<float>;

// Rows [from, to) of width-wide rows.
inline Logits rows(const Logits& all, size_t width, size_t from, size_t to) {
  return {all.begin() + static_cast<ptrdiff_t>(from * width),
          all.begin() + static_cast<ptrdiff_t>(to * width)};
}

// Bit for bit; a NaN is never equal, not even to itself.
inline ::testing::AssertionResult same_bits(const Logits& a, const Logits& b, size_t width) {
  if (a.size() != b.size())
    return ::testing::AssertionFailure() << a.size() << " logits against " << b.size();
  for (size_t i = 0; i < a.size(); ++i)
    if (std::isnan(a[i]) || std::memcmp(&a[i], &b[i], sizeof(float)) != 0)
      return ::testing::AssertionFailure()
             << "row " << i / width << " column " << i % width << ": " << a[i] << " against " << b[i];
  return ::testing::AssertionSuccess();
}

inline double largest_difference(const Logits& a, const Logits& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - b[i]);
    largest = std::isfinite(d) ? std::max(largest, d) : INFINITY;
  }
  return largest;
}

inline int32_t best(const float* row, size_t width) {
  return static_cast<int32_t>(std::max_element(row, row + width) - row);
}

struct RigOptions {
  int threads = 1;
  int max_tokens = 512;
  int sequences = 6;
  int checkpoints = 4;
  int context = 320;
  Poison poison = Poison::nans;  // of caches and step values: whatever reads what nobody wrote shows
  bool trace = false;
  ExecMode exec = ExecMode::super;
  IndexFormat index_cache = IndexFormat::operand;
  LatentFormat latent_cache = LatentFormat::operand;
  MixForm mix = MixForm::two_stages;  // tiny models have few blocks
};

class Rig {
 public:
  // Tokens of one sequence in a step, and where all their logits go.
  struct Piece {
    Sequence* sequence;
    std::span<const int32_t> ids;
    Logits* logits;
  };

  Rig(const std::string& folder, const KernelTable& kernels, const RigOptions& options = {})
      : team_(options.threads, false, kernels.thread_init) {
    BuildOptions build;
    build.max_tokens = build.max_logits = options.max_tokens;
    build.trace = options.trace;
    build.exec = options.exec;
    build.index_cache = options.index_cache;
    build.latent_cache = options.latent_cache;
    build.mix = options.mix;
    build.poison = options.poison == Poison::nans;
    model_ = std::make_unique<Model>(folder, kernels, build);
    const CacheLimits limits{pages_for(options.context) * options.sequences, options.sequences,
                             options.checkpoints, options.context};
    caches_ = std::make_unique<Caches>(model_->cache_shape(), limits, options.poison);
    model_->load(team_, {});
    model_->bind(*caches_, team_);
    batch_ =
        std::make_unique<Batch>(options.max_tokens, options.max_tokens, options.sequences, options.context);
  }

  Model& model() { return *model_; }
  Caches& caches() { return *caches_; }
  size_t vocab() const { return static_cast<size_t>(model_->config().vocab); }
  bool recurrent() const { return model_->parts().caches.recurrent; }
  Sequence create() { return caches_->create(); }

  // One step over all pieces, in their order.
  template <class Prepare>
  void step(const std::vector<Piece>& pieces, const Prepare& prepare) {
    batch_->clear();
    std::vector<int> row;
    for (const Piece& p : pieces) {
      WEFT_CHECK(p.sequence->can_extend(static_cast<int>(p.ids.size())));
      p.sequence->extend(static_cast<int>(p.ids.size()));
      row.push_back(batch_->add(*p.sequence, p.ids, WantLogits::all));
    }
    prepare(batch_->header());
    model_->run(batch_->header());
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int n = static_cast<int>(pieces[i].ids.size());
      pieces[i].sequence->commit(n);
      for (int j = 0; pieces[i].logits && j < n; ++j)
        pieces[i].logits->insert(pieces[i].logits->end(), model_->logits(row[i] + j),
                                 model_->logits(row[i] + j) + vocab());
    }
  }
  void step(const std::vector<Piece>& pieces) {
    step(pieces, [](StepHeader&) {});
  }

  // All of `ids` behind what the sequence holds, `chunk` tokens a step (0: one step).
  Logits feed(Sequence& sequence, std::span<const int32_t> ids, int chunk = 0) {
    Logits logits;
    const size_t most = chunk > 0 ? static_cast<size_t>(chunk) : ids.size();
    for (size_t at = 0; at < ids.size(); at += most)
      step({{&sequence, ids.subspan(at, std::min(most, ids.size() - at)), &logits}});
    return logits;
  }
  Logits solo(std::span<const int32_t> ids, int chunk = 0) {
    Sequence sequence = create();
    return feed(sequence, ids, chunk);
  }

 private:
  Team team_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Caches> caches_;
  std::unique_ptr<Batch> batch_;
};

}  // namespace test
}  // namespace weft
