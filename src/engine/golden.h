// The recorded cases of a checkpoint's golden.json, and a model that runs them: what verify judges and eval compares.
//
// Schema: golden.json has `cases`, each with name, ids, logits and optionally experts, selected {layer: tensor}, greedy,
// hidden and bf16_activations_max_abs_diff; the names are tensors of golden.safetensors. experts are [tokens, layers, k]
// or [layers, tokens, k]; selected are [tokens, width], ascending, -1 padded.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/batch.h"
#include "model/model.h"

namespace weft {

struct GoldenInts {
  std::vector<int64_t> shape;
  std::vector<int32_t> data;
};

class GoldenFile {
 public:
  // error: no such files, no cases.
  explicit GoldenFile(const std::string& directory);
  const Json& json() const { return json_; }
  const Json& cases() const { return json_["cases"]; }
  int longest() const;  // tokens of a case
  const TensorInfo& tensor(const std::string& name) const;
  GoldenInts ints(const std::string& name) const;
  std::vector<float> floats(const std::string& name) const;

 private:
  Json json_;
  std::string where_;
  SafetensorsFile file_;
};

// Everything one case records.
struct GoldenCase {
  std::string name;
  std::vector<int32_t> ids, greedy;
  std::vector<float> logits;
  std::vector<std::vector<int32_t>> experts;   // [moe layer][tokens * k]
  std::vector<std::vector<int32_t>> selected;  // [dsa layer][tokens * width], in the engine's width
  double bf16_drift = -1;
};

// What one run of a case did.
struct GoldenRun {
  std::vector<float> logits;
  std::vector<std::vector<int32_t>> experts, selected;  // as in GoldenCase
};

double number_at(const Json& json, std::initializer_list<const char*> path);  // -1: not there

class GoldenRunner {
 public:
  // build: max_tokens and max_logits are set to what the longest case takes.
  GoldenRunner(const std::string& directory, const KernelTable& kernels, int threads, BuildOptions build);

  const Model& model() const { return *model_; }
  const GoldenFile& golden() const { return golden_; }
  bool bf16() const { return kernels_.bf16_operands; }
  const char* isa() const { return kernels_.isa; }

  GoldenCase read_case(const Json& json) const;
  GoldenRun run(const GoldenCase& c, int chunk, bool forced);  // chunk: tokens of a step, 0 = all
  // Continues the last run token by token; how many of the recorded greedy tokens are missed.
  int greedy(const GoldenCase& c, const std::vector<float>& logits);

 private:
  void read_experts(GoldenCase& c, const GoldenInts& t) const;
  void read_selected(GoldenCase& c, const Json& by_layer) const;
  template <class F>
  void forward(std::span<const int32_t> ids, WantLogits want, const F& prepare);

  GoldenFile golden_;
  const KernelTable& kernels_;
  Team team_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Caches> caches_;
  std::unique_ptr<Batch> batch_;
  Sequence sequence_;
};

}  // namespace weft
