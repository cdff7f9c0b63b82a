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
    if (f.has("selected")) read_selected(c, json["selected"]);
    return c;
  }

  // Whether every choice the model makes on this prompt is recorded.
  bool complete(const Case& c) const {
    const Builder& parts = model_->parts();
    const bool selects = parts.dsa_layers > 0 && static_cast<int>(c.ids.size()) > model_->config().indexer.topk;
    return (parts.moe_layers == 0 || !c.experts.empty()) && (!selects || !c.selected.empty());
  }

  void run(const Case& c, int chunk, bool forced, VerifyRow& row) {
    const Builder& parts = model_->parts();
    const int tokens = static_cast<int>(c.ids.size()), k = model_->config().moe.top_k, width = parts.selection_width;
    const int step = chunk > 0 ? std::min(chunk, tokens) : tokens;
    std::vector<std::vector<int32_t>> experts(parts.moe_layers, std::vector<int32_t>(static_cast<size_t>(tokens) * k));
    std::vector<std::vector<int32_t>> selected(parts.dsa_layers,
                                               std::vector<int32_t>(static_cast<size_t>(tokens) * width));
    std::vector<float> logits(c.logits.size());
    Sequence sequence = caches_->create();
    for (int at = 0; at < tokens; at += step) {
      const int n = std::min(step, tokens - at);
      const auto from = [at](const std::vector<std::vector<int32_t>>& v, int per_row) {
        std::vector<const int32_t*> out;
        for (const auto& layer : v) out.push_back(layer.data() + static_cast<size_t>(at) * per_row);
        return out;
      };
      const auto force_experts = from(c.experts, k), force_selected = from(c.selected, width);
      std::vector<int32_t*> see_experts, see_selected;
      for (auto& layer : experts) see_experts.push_back(layer.data() + static_cast<size_t>(at) * k);
      for (auto& layer : selected) see_selected.push_back(layer.data() + static_cast<size_t>(at) * width);
      forward(sequence, {c.ids.data() + at, static_cast<size_t>(n)}, WantLogits::all, [&](StepHeader& h) {
        h.seen_experts = see_experts.data();
        h.seen_selection = see_selected.data();
        if (forced && !c.experts.empty()) h.forced_experts = force_experts.data();
        if (forced && !c.selected.empty()) h.forced_selection = force_selected.data();
      });
      const size_t vocab = model_->config().vocab;
      for (int i = 0; i < n; ++i) std::copy_n(model_->logits(i), vocab, logits.begin() + (at + i) * vocab);
    }
    compare_logits(c, logits, row);
    if (!forced) {
      row.experts_wrong = c.experts.empty() ? -1 : rows_that_differ(c.experts, experts, k, tokens);
      row.sets_wrong = c.selected.empty() ? -1 : rows_that_differ(c.selected, selected, width, tokens);
      if (!c.greedy.empty()) row.greedy_wrong = greedy(sequence, c, logits);
    }
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
  void forward(Sequence& sequence, std::span<const int32_t> ids, WantLogits want, const F& prepare) {
    WEFT_CHECK(sequence.can_extend(static_cast<int>(ids.size())));
    sequence.extend(static_cast<int>(ids.size()));
    batch_->clear();
    batch_->add(sequence, ids, want);
    prepare(batch_->header());
    model_->run(batch_->header());
    sequence.commit(static_cast<int>(ids.size()));
  }

  static int rows_that_differ(const std::vector<std::vector<int32_t>>& a, const std::vector<std::vector<int32_t>>& b,
                              int per_row, int tokens) {
    int wrong = 0;
    for (int i = 0; i < tokens; ++i) {
      bool same = true;
      for (size_t l = 0; l < a.size(); ++l)
        same = same && std::equal(a[l].begin() + i * per_row, a[l].begin() + (i + 1) * per_row, b[l].begin() + i * per_row);
      wrong += !same;
    }
    return wrong;
  }

  int greedy(Sequence& sequence, const Case& c, const std::vector<float>& logits) {
    const int vocab = model_->config().vocab;
    const auto best = [vocab](const float* row) { return static_cast<int32_t>(std::max_element(row, row + vocab) - row); };
    int32_t token = best(logits.data() + logits.size() - vocab);
    int wrong = 0;
    for (size_t i = 0; i < c.greedy.size(); ++i) {
      wrong += token != c.greedy[i];
      if (i + 1 == c.greedy.size() || !sequence.can_extend(1)) break;
      forward(sequence, {&token, 1}, WantLogits::last, [](StepHeader&) {});
      token = best(model_->logits(0));
    }
    return wrong;
  }

  void compare_logits(const Case& c, const std::vector<float>& logits, VerifyRow& row) const {
    double worst = 0, sum = 0;
    std::vector<double> per_row;
    const size_t vocab = model_->config().vocab;
    for (size_t i = 0; i < c.ids.size(); ++i) {
      double row_worst = 0;
      for (size_t j = 0; j < vocab; ++j) {
        const double d = std::fabs(static_cast<double>(logits[i * vocab + j]) - c.logits[i * vocab + j]);
        row_worst = std::isfinite(d) ? std::max(row_worst, d) : INFINITY;
        sum += d;
      }
      per_row.push_back(row_worst);
      worst = std::max(worst, row_worst);
    }
    std::sort(per_row.begin(), per_row.end());
    row.error = worst;
    row.mean_error = sum / static_cast<double>(logits.size());
    row.row_quantile = per_row[std::min(per_row.size() - 1, per_row.size() * 99 / 100)];
  }

  Golden golden_;
  const KernelTable& kernels_;
  Team team_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Caches> caches_;
  std::unique_ptr<Batch> batch_;
  int context_ = 0;
};

void judge(const Runner& runner, const Case& c, bool forced, VerifyRow& row) {
  const Json& json = runner.golden().json();
  const bool choices = row.sets_wrong <= 0 && row.experts_wrong <= 0 && row.greedy_wrong <= 0;
  if (!forced) {
    const double recorded = number_at(json, {"tolerance", "logits_fp32_vs_fp64"});
    row.error_kind = "max";
    row.bound = runner.bf16() ? 2 * c.bf16_drift : recorded > 0 ? 5 * recorded : 3e-4;
    row.pass = row.error <= row.bound && choices;
    return;
  }
  const double mean = number_at(json, {"bf16_activations", "selections_and_experts_forced", "mean_abs_logit_change"});
  const double most = number_at(json, {"bf16_activations", "selections_and_experts_forced", "max_abs_logit_change"});
  row.error_kind = "mean";
  row.bound = mean > 0 ? 2 * mean : 0.1;
  row.pass = row.mean_error <= row.bound && (most <= 0 || row.row_quantile <= most);
}

}  // namespace

bool VerifyReport::pass() const {
  return std::all_of(rows.begin(), rows.end(), [](const VerifyRow& r) { return r.pass || r.skipped; }) && checked() > 0;
}
int VerifyReport::checked() const {
  return static_cast<int>(std::count_if(rows.begin(), rows.end(), [](const VerifyRow& r) { return !r.skipped; }));
}

VerifyReport verify(const std::string& directory, const VerifyOptions& options) {
  Runner runner(directory, options);
  VerifyReport report{directory, runner.isa(), runner.model().config().family, options.threads, {}};
  std::set<std::string> wanted(options.cases.begin(), options.cases.end());
  for (const Json& json : runner.golden().json()["cases"]) {
    const Case c = runner.read_case(json);
    if (!options.cases.empty() && !wanted.contains(c.name)) continue;
    wanted.erase(c.name);
    for (const int chunk : options.chunks) {
      VerifyRow row;
      row.name = c.name, row.tokens = static_cast<int>(c.ids.size()), row.chunk = chunk;
      const bool forced = runner.bf16() && c.bf16_drift < 0;
      if (forced && !runner.complete(c)) {
        row.mode = "skipped: not all choices are recorded";
        row.skipped = true;
      } else {
        row.mode = forced ? "forced" : "free";
        runner.run(c, chunk, forced, row);
        judge(runner, c, forced, row);
      }
      report.rows.push_back(row);
    }
  }
  if (!wanted.empty()) usage("--cases: {}/golden.json has no case {}", directory, *wanted.begin());
  return report;
}

}  // namespace weft
