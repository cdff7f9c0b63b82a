#include "engine/verify.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/check.h"
#include "engine/batch.h"
#include "kernels/dispatch.h"
#include "model/model.h"

namespace weft {
namespace {

struct Ints {
  std::vector<int64_t> shape;
  std::vector<int32_t> data;
};

class Golden {
 public:
  explicit Golden(const std::string& directory)
      : json_(parse_json_file(directory + "/golden.json")), file_(directory + "/golden.safetensors") {
    if (!json_.is_object() || !json_.contains("cases") || !json_["cases"].is_array())
      fail("{}/golden.json: cases: expected an array", directory);
  }
  const Json& json() const { return json_; }
  const TensorInfo& tensor(const std::string& name) const {
    for (const TensorInfo& t : file_.tensors())
      if (t.name == name) return t;
    fail("{}: tensor {} is missing, though golden.json names it", file_.path(), name);
  }
  Ints ints(const std::string& name) const {
    const TensorInfo& t = tensor(name);
    if (t.dtype != StoredDtype::i32 && t.dtype != StoredDtype::i64)
      fail("{}: {}: dtype {}, expected I32", file_.path(), name, stored_name(t.dtype));
    Ints out{t.shape, std::vector<int32_t>(t.elements())};
    if (t.dtype == StoredDtype::i32) {
      read_elements(t, 0, t.elements(), out.data.data());
    } else {
      std::vector<int64_t> wide(t.elements());
      read_elements(t, 0, t.elements(), wide.data());
      std::copy(wide.begin(), wide.end(), out.data.begin());
    }
    return out;
  }
  std::vector<float> floats(const std::string& name) const {
    const TensorInfo& t = tensor(name);
    std::vector<float> out(t.elements());
    read_f32(t, 0, t.elements(), out.data());
    return out;
  }

 private:
  Json json_;
  SafetensorsFile file_;
};

// Everything one case records.
struct Case {
  std::string name;
  std::vector<int32_t> ids, greedy;
  std::vector<float> logits;
  std::vector<std::vector<int32_t>> experts;   // [moe layer][tokens * k]
  std::vector<std::vector<int32_t>> selected;  // [dsa layer][tokens * width], in the engine's width
  double bf16_drift = -1;
};

// What one run of a case did.
struct Seen {
  std::vector<float> logits;
  std::vector<std::vector<int32_t>> experts, selected;  // as in Case
};

double number_at(const Json& json, std::initializer_list<const char*> path) {
  const Json* at = &json;
  for (const char* key : path) {
    if (!at->is_object() || !at->contains(key)) return -1;
    at = &(*at)[key];
  }
  return at->is_number() ? at->get<double>() : -1;
}

class Runner {
 public:
  Runner(const std::string& directory, const VerifyOptions& options)
      : golden_(directory),
        kernels_(options.kernels ? *options.kernels : choose_kernels(options.isa, cpu_features())),
        team_(options.threads, false, kernels_.thread_init) {
    int longest = 1;
    for (const Json& c : golden_.json()["cases"]) {
      Fields fields(c, directory + "/golden.json: cases");
      longest = std::max(longest, static_cast<int>(golden_.tensor(fields.string("ids")).elements()));
    }
    context_ = longest + 64;
    BuildOptions build;
    build.max_tokens = build.max_logits = longest;
    build.exec = options.exec;
    build.dsa = options.dsa;
    model_ = std::make_unique<Model>(directory, kernels_, build);
    CacheLimits limits{pages_for(context_) * 2, 2, 1, context_};
    caches_ = std::make_unique<Caches>(model_->cache_shape(), limits);
    model_->load(team_, {});
    model_->bind(*caches_, team_);
    batch_ = std::make_unique<Batch>(longest, longest, 2, context_);
  }

  const Model& model() const { return *model_; }
  const Golden& golden() const { return golden_; }
  bool bf16() const { return kernels_.bf16_operands; }
  const char* isa() const { return kernels_.isa; }

  Case read_case(const Json& json) const {
    const Fields f(json, "golden.json: cases");
    Case c;
    c.name = f.string("name");
    c.ids = golden_.ints(f.string("ids")).data;
    c.logits = golden_.floats(f.string("logits"));
    for (const int32_t id : c.ids)
      if (id < 0 || id >= model_->config().vocab)
        fail("golden.json: case {}: token id {} is outside the vocabulary of {}", c.name, id, model_->config().vocab);
    if (c.logits.size() != c.ids.size() * model_->config().vocab)
      fail("golden.json: case {}: {} logits for {} tokens of a vocabulary of {}", c.name, c.logits.size(), c.ids.size(),
           model_->config().vocab);
    if (f.has("greedy")) c.greedy = golden_.ints(f.string("greedy")).data;
    c.bf16_drift = number_at(json, {"bf16_activations_max_abs_diff"});
    if (f.has("experts")) read_experts(c, golden_.ints(f.string("experts")));
    if (f.has("selected") && model_->parts().options.dsa == DsaMode::sparse) read_selected(c, json["selected"]);
    return c;
  }

  Seen run(const Case& c, int chunk, bool forced) {
    const Builder& parts = model_->parts();
    const int tokens = static_cast<int>(c.ids.size()), k = model_->config().moe.top_k, width = parts.selection_width;
    const int step = chunk > 0 ? std::min(chunk, tokens) : tokens;
    Seen seen;
    seen.experts.assign(parts.moe_layers, std::vector<int32_t>(static_cast<size_t>(tokens) * k));
    seen.selected.assign(parts.dsa_layers, std::vector<int32_t>(static_cast<size_t>(tokens) * width));
    seen.logits.resize(c.logits.size());
    sequence_ = caches_->create();
    for (int at = 0; at < tokens; at += step) {
      const int n = std::min(step, tokens - at);
      const auto from = [at](const std::vector<std::vector<int32_t>>& v, int per_row) {
        std::vector<const int32_t*> out;
        for (const auto& layer : v) out.push_back(layer.data() + static_cast<size_t>(at) * per_row);
        return out;
      };
      const auto force_experts = from(c.experts, k), force_selected = from(c.selected, width);
      std::vector<int32_t*> see_experts, see_selected;
      for (auto& layer : seen.experts) see_experts.push_back(layer.data() + static_cast<size_t>(at) * k);
      for (auto& layer : seen.selected) see_selected.push_back(layer.data() + static_cast<size_t>(at) * width);
      forward({c.ids.data() + at, static_cast<size_t>(n)}, WantLogits::all, [&](StepHeader& h) {
        h.seen_experts = see_experts.data();
        h.seen_selection = see_selected.data();
        if (forced && !c.experts.empty()) h.forced_experts = force_experts.data();
        if (forced && !c.selected.empty()) h.forced_selection = force_selected.data();
      });
      const size_t vocab = model_->config().vocab;
      for (int i = 0; i < n; ++i) std::copy_n(model_->logits(i), vocab, seen.logits.begin() + (at + i) * vocab);
    }
    return seen;
  }

  // Continues the last run token by token; how many of the recorded greedy tokens are missed.
  int greedy(const Case& c, const std::vector<float>& logits) {
    const int vocab = model_->config().vocab;
    const auto best = [vocab](const float* row) {
      return static_cast<int32_t>(std::max_element(row, row + vocab) - row);
    };
    int32_t token = best(logits.data() + logits.size() - vocab);
    int wrong = 0;
    for (size_t i = 0; i < c.greedy.size(); ++i) {
      wrong += token != c.greedy[i];
      if (i + 1 == c.greedy.size() || !sequence_.can_extend(1)) break;
      forward({&token, 1}, WantLogits::last, [](StepHeader&) {});
      token = best(model_->logits(0));
    }
    return wrong;
  }

 private:
  void read_experts(Case& c, const Ints& t) const {
    const int64_t tokens = static_cast<int64_t>(c.ids.size()), layers = model_->parts().moe_layers,
                  k = model_->config().moe.top_k;
    if (t.shape.size() != 3 || t.shape[2] != k ||
        !((t.shape[0] == layers && t.shape[1] == tokens) || (t.shape[0] == tokens && t.shape[1] == layers)))
      fail("golden.json: case {}: experts have shape {}", c.name, shape_text(t.shape));
    const bool layer_first = t.shape[0] == layers && (layers != tokens || !golden_.json().contains("kind"));
    c.experts.assign(layers, std::vector<int32_t>(tokens * k));
    for (int64_t l = 0; l < layers; ++l)
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t j = 0; j < k; ++j)
          c.experts[l][i * k + j] = t.data[(layer_first ? l * tokens + i : i * layers + l) * k + j];
  }

  void read_selected(Case& c, const Json& by_layer) const {
    const int width = model_->parts().selection_width;
    std::vector<std::pair<int, std::string>> layers;  // in layer order
    for (const auto& [layer, name] : by_layer.items()) layers.emplace_back(std::stoi(layer), name.get<std::string>());
    std::sort(layers.begin(), layers.end());
    if (static_cast<int>(layers.size()) != model_->parts().dsa_layers)
      fail("golden.json: case {}: {} selected sets for {} indexers", c.name, layers.size(), model_->parts().dsa_layers);
    for (const auto& [layer, name] : layers) {
      const Ints t = golden_.ints(name);
      const int tokens = static_cast<int>(c.ids.size()), columns = static_cast<int>(t.shape.at(1));
      std::vector<int32_t> rows(static_cast<size_t>(tokens) * width, -1);
      for (int i = 0; i < tokens; ++i) {
        int n = 0;
        for (int j = 0; j < columns; ++j)
          if (const int32_t p = t.data[static_cast<size_t>(i) * columns + j]; p >= 0) {
            if (n == width || p > i) fail("golden.json: case {}: selected set of row {} does not fit", c.name, i);
            rows[static_cast<size_t>(i) * width + n++] = p;
          }
      }
      c.selected.push_back(std::move(rows));
    }
  }

  template <class F>
  void forward(std::span<const int32_t> ids, WantLogits want, const F& prepare) {
    WEFT_CHECK(sequence_.can_extend(static_cast<int>(ids.size())));
    sequence_.extend(static_cast<int>(ids.size()));
    batch_->clear();
    batch_->add(sequence_, ids, want);
    prepare(batch_->header());
    model_->run(batch_->header());
    sequence_.commit(static_cast<int>(ids.size()));
  }

  Golden golden_;
  const KernelTable& kernels_;
  Team team_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Caches> caches_;
  std::unique_ptr<Batch> batch_;
  Sequence sequence_;
  int context_ = 0;
};

// Per row: whether any layer chose otherwise.
std::vector<bool> differing_rows(const std::vector<std::vector<int32_t>>& a, const std::vector<std::vector<int32_t>>& b,
                                 size_t tokens) {
  std::vector<bool> differs(tokens);
  for (size_t l = 0; l < a.size() && l < b.size(); ++l) {
    const size_t per_row = a[l].size() / tokens;
    for (size_t i = 0; i < tokens; ++i)
      if (!std::equal(a[l].begin() + i * per_row, a[l].begin() + (i + 1) * per_row, b[l].begin() + i * per_row))
        differs[i] = true;
  }
  return differs;
}
int count(const std::vector<bool>& rows) { return static_cast<int>(std::count(rows.begin(), rows.end(), true)); }

// Largest error of each row; fills the row's totals.
std::vector<double> compare_logits(const Case& c, const std::vector<float>& logits, VerifyRow& row) {
  const size_t tokens = c.ids.size(), vocab = logits.size() / tokens;
  std::vector<double> errors(tokens);
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double d = std::fabs(static_cast<double>(logits[i]) - c.logits[i]);
    errors[i / vocab] = std::isfinite(d) ? std::max(errors[i / vocab], d) : INFINITY;
    sum += d;
  }
  std::vector<double> sorted = errors;
  std::sort(sorted.begin(), sorted.end());
  row.error = sorted.back();
  row.mean_error = sum / static_cast<double>(logits.size());
  row.row_quantile = sorted[std::min(tokens - 1, tokens * 9 / 10)];
  return errors;
}

// For a golden.json that records none: the largest of the tiny checkpoints whose logits are, like theirs, N(0, 1).
constexpr double kTypicalDrift = 0.27;

// f32 operands: everything equal, logits within the f32 bound.
void judge_f32(Runner& runner, const Case& c, const Seen& seen, VerifyRow& row) {
  const double recorded = number_at(runner.golden().json(), {"tolerance", "logits_fp32_vs_fp64"});
  compare_logits(c, seen.logits, row);
  row.bound = recorded > 0 ? 5 * recorded : 3e-4;
  if (!c.experts.empty()) row.experts_wrong = count(differing_rows(c.experts, seen.experts, c.ids.size()));
  if (!c.selected.empty()) row.sets_wrong = count(differing_rows(c.selected, seen.selected, c.ids.size()));
  if (!c.greedy.empty()) row.greedy_wrong = runner.greedy(c, seen.logits);
  row.pass = row.error <= row.bound && row.sets_wrong <= 0 && row.experts_wrong <= 0 && row.greedy_wrong <= 0;
}

// bf16 operands with the reference's choices forced. Single rows are ill-conditioned (a small KDA output before o_norm, a
// small expert sum before its norm), so nine rows in ten and the mean are judged, not the maximum.
void judge_forced(Runner& runner, const Case& c, double drift, const Seen& seen, VerifyRow& row) {
  const double mean = number_at(runner.golden().json(),
                                {"bf16_activations", "selections_and_experts_forced", "mean_abs_logit_change"});
  compare_logits(c, seen.logits, row);
  row.bound = 2 * drift;
  row.pass = row.row_quantile <= row.bound && (mean <= 0 || row.mean_error <= 2 * mean);
}

// bf16 operands, own choices. Rows that choose as the reference in every layer are within the bound, all of them; a row
// that flips a near call moves by O(1), and at most one row in five may.
void judge_free(const Case& c, const Seen& seen, VerifyRow& row) {
  const std::vector<double> errors = compare_logits(c, seen.logits, row);
  const std::vector<bool> experts = differing_rows(c.experts, seen.experts, c.ids.size()),
                          sets = differing_rows(c.selected, seen.selected, c.ids.size());
  row.bound = 2 * c.bf16_drift;
  row.experts_wrong = count(experts);
  row.sets_wrong = count(sets);
  row.pass = true;
  int flipped = 0;
  for (size_t i = 0; i < errors.size(); ++i) {
    const bool same = !experts[i] && !sets[i];
    flipped += !same;
    if (same && errors[i] > row.bound) row.pass = false;
  }
  row.pass = row.pass && 5 * flipped <= static_cast<int>(errors.size());
}

}  // namespace

bool VerifyReport::pass() const {
  return !rows.empty() && std::all_of(rows.begin(), rows.end(), [](const VerifyRow& r) { return r.pass; });
}

VerifyReport verify(const std::string& directory, const VerifyOptions& options) {
  Runner runner(directory, options);
  std::unique_ptr<Runner> reference;  // f32 operands: completes the choices a case does not record
  if (runner.bf16()) {
    VerifyOptions exact = options;
    exact.kernels = nullptr;
    exact.isa = "portable";
    reference = std::make_unique<Runner>(directory, exact);
  }
  const double forced_drift = number_at(
      runner.golden().json(), {"bf16_activations", "selections_and_experts_forced", "max_abs_logit_change"});
  double drift = forced_drift;  // of bf16 activations with the same choices, largest
  for (const Json& json : runner.golden().json()["cases"])
    drift = std::max(drift, number_at(json, {"bf16_activations_max_abs_diff"}));
  if (drift <= 0) drift = kTypicalDrift;

  VerifyReport report{directory, runner.isa(), runner.model().config().family,
                      exec_name(options.exec), options.threads, {}};
  std::set<std::string> wanted(options.cases.begin(), options.cases.end());
  for (const Json& json : runner.golden().json()["cases"]) {
    Case c = runner.read_case(json);
    if (!options.cases.empty() && !wanted.contains(c.name)) continue;
    wanted.erase(c.name);
    if (reference) {
      const Seen exact = reference->run(c, 0, false);
      if (c.experts.empty()) c.experts = exact.experts;
      if (c.selected.empty()) c.selected = exact.selected;
    }
    for (const int chunk : options.chunks) {
      VerifyRow row;
      row.name = c.name, row.tokens = static_cast<int>(c.ids.size()), row.chunk = chunk;
      row.mode = "free";
      if (!runner.bf16()) {
        judge_f32(runner, c, runner.run(c, chunk, false), row);
      } else {
        if (c.bf16_drift > 0) {
          judge_free(c, runner.run(c, chunk, false), row);
          report.rows.push_back(row);
        }
        row = {};
        row.name = c.name, row.tokens = static_cast<int>(c.ids.size()), row.chunk = chunk, row.mode = "forced";
        judge_forced(runner, c, drift, runner.run(c, chunk, true), row);
      }
      report.rows.push_back(row);
    }
  }
  if (!wanted.empty()) usage("--cases: {}/golden.json has no case {}", directory, *wanted.begin());
  return report;
}

}  // namespace weft
