#include "model/builder.h"

#include <array>
#include <memory>

#include "base/check.h"

namespace weft {
namespace {

constexpr std::array kPrefixes = {"model.", "language_model.model.", "model.language_model.", "language_model.", ""};

std::string find_prefix(const Checkpoint& checkpoint) {
  for (const char* prefix : kPrefixes)
    if (checkpoint.find(fmt::format("{}embed_tokens.weight", prefix))) return prefix;
  fail("{}: no tensor *embed_tokens.weight: not a language model, or its weight files are incomplete",
       checkpoint.path());
}

// Elements between rows: an odd number of cache lines (f32: of pairs of them), so that 32 rows of a block spread over the
// sets of L1. At multiples of 4 KB 16 rows share one set (measured: 187 against 101 GFLOP/s on Zen 4).
int pitch(int width, int element_bytes) {
  const int ld = round_up(width, 32);
  return ld / 32 % 2 ? ld : ld + (element_bytes == 2 || ld * element_bytes % 4096 == 0 ? 32 : 0);
}

}  // namespace

Builder::Builder(const KernelTable& kernels, const ModelConfig& config, const Checkpoint& checkpoint,
                 BuildOptions options)
    : kernels(kernels), config(config), options(options), checkpoint_(checkpoint), prefix_(find_prefix(checkpoint)) {}

ActParams Builder::activation() const {
  switch (config.activation) {
    case Activation::swiglu: return {};
    case Activation::swiglu_clamped: return {Act::swiglu_clamped, config.swiglu_limit, 0, 0};
    case Activation::situ: return {Act::situ, 0, config.situ_beta, config.situ_linear_beta};
  }
  return {};
}

int Builder::row_capacity(Rows rows) const {
  return round_up(rows == Rows::tokens ? options.max_tokens : options.max_logits, 16);
}

const TensorInfo* Builder::find(const std::string& name) const { return checkpoint_.find(prefix_ + name); }

const TensorInfo& Builder::tensor(const std::vector<std::string>& names, std::vector<int64_t> shape) {
  for (const std::string& name : names) {
    const TensorInfo* info = find(name);
    if (!info) continue;
    std::vector<int64_t> found = info->shape;
    if (found != shape)
      fail("{}: {}: shape {}, expected {}", info->file, info->name, shape_text(found), shape_text(shape));
    return checkpoint_.use(info->name);
  }
  fail("{}: tensor {}{} is missing (expected shape {})", checkpoint_.path(), prefix_, names.front(), shape_text(shape));
}

StoredMatrix Builder::stored(const std::string& name, int64_t rows, int64_t columns) {
  StoredMatrix m = as_stored(name, rows, columns);
  if (!options.tier.experts || !is_routed_expert(name) || packed_format(m) == *options.tier.experts) return m;
  if (scale_dtype(*options.tier.experts) == StoredDtype::u8 && columns % 32)
    fail("{}{}: MX formats need columns in groups of 32, found {}: choose another tier", prefix_, name, columns);
  m.target = options.tier.experts;
  return m;
}

StoredMatrix Builder::as_stored(const std::string& name, int64_t rows, int64_t columns) {
  StoredMatrix m{.rows = rows, .columns = columns};
  if (find(name + ".weight_packed") && !find(name + ".weight")) {
    if (columns % 32) fail("{}{}: MXFP4 needs columns in groups of 32, found {}", prefix_, name, columns);
    m.values = &tensor({name + ".weight_packed"}, {rows, columns / 2});
    m.scales = &tensor({name + ".weight_scale"}, {rows, columns / 32});
    for (const TensorInfo* t : {m.values, m.scales})
      if (t->dtype != StoredDtype::u8 && !(t == m.scales && t->dtype == StoredDtype::f8_e8m0))
        fail("{}: {}: dtype {}, expected U8", t->file, t->name, stored_name(t->dtype));
    return m;
  }
  m.values = &tensor({name + ".weight", name}, {rows, columns});
  switch (m.values->dtype) {
    case StoredDtype::bf16:
    case StoredDtype::f16:
    case StoredDtype::f32: return m;
    case StoredDtype::i8:
      m.scales = &tensor({name + ".weight_scale"}, {rows});
      if (m.scales->dtype != StoredDtype::f32)
        fail("{}: {}: dtype {}, expected F32", m.scales->file, m.scales->name, stored_name(m.scales->dtype));
      return m;
    case StoredDtype::f8_e4m3: break;
    default:
      fail("{}: {}: dtype {}, expected BF16, F16, F32, F8_E4M3 or I8", m.values->file, m.values->name,
           stored_name(m.values->dtype));
  }
  if (find(name + ".weight_scale")) {  // MXFP8
    if (columns % 32) fail("{}{}: MXFP8 needs columns in groups of 32, found {}", prefix_, name, columns);
    m.scales = &tensor({name + ".weight_scale"}, {rows, columns / 32});
    if (m.scales->dtype != StoredDtype::u8 && m.scales->dtype != StoredDtype::f8_e8m0)
      fail("{}: {}: dtype {}, expected U8 or F8_E8M0", m.scales->file, m.scales->name, stored_name(m.scales->dtype));
    return m;
  }
  if (!find(name + ".weight_scale_inv"))
    fail("{}: {} is F8_E4M3 but {}{}.weight_scale_inv is missing: FP8 weights cannot be read without their scales",
         m.values->file, m.values->name, prefix_, name);
  m.scales = &tensor({name + ".weight_scale_inv"},
                     {(rows + kScaleBlock - 1) / kScaleBlock, (columns + kScaleBlock - 1) / kScaleBlock});
  if (m.scales->dtype != StoredDtype::f32)
    fail("{}: {}: dtype {}, expected F32", m.scales->file, m.scales->name, stored_name(m.scales->dtype));
  return m;
}

int Builder::add_matrix(Matrix matrix) {
  matrix.codes = graph.external(matrix.label + " codes");
  if (matrix.w.scale_bytes()) matrix.scales = graph.external(matrix.label + " scales");
  weights.matrices.push_back(std::move(matrix));
  return static_cast<int>(weights.matrices.size()) - 1;
}

namespace {

void add_sources(Matrix& matrix, const StoredMatrix& m) {
  matrix.sources.push_back(m.values);
  if (m.scales) matrix.sources.push_back(m.scales);
}

// Panel p of parts laid side by side, each from a multiple of `align` columns.
Matrix side_by_side(std::string label, std::vector<StoredMatrix> parts, int align = kPanel) {
  Matrix matrix;
  matrix.label = std::move(label);
  int panels = 0;
  auto starts = std::make_shared<std::vector<int>>();
  for (const StoredMatrix& m : parts) {
    starts->push_back(panels);
    panels += round_up(static_cast<int>(m.rows), align) / kPanel;
    add_sources(matrix, m);
  }
  matrix.w = {.n = parts.size() == 1 ? static_cast<int>(parts[0].rows) : panels * kPanel,
              .k = static_cast<int>(parts[0].columns), .format = packed_format(parts[0])};
  matrix.pack = [starts, parts = std::move(parts)](int, int panel, std::byte* codes, std::byte* scales) {
    size_t i = parts.size() - 1;
    while ((*starts)[i] > panel) --i;
    pack_rows(parts[i], static_cast<int64_t>(panel - (*starts)[i]) * kPanel, codes, scales);
  };
  return matrix;
}

// (gate, up) panels in turn; rows padded to 32 so that the activated row needs no clearing.
Matrix interleaved(std::string label, std::vector<std::pair<StoredMatrix, StoredMatrix>> copies) {
  Matrix matrix;
  matrix.label = std::move(label);
  const StoredMatrix& first = copies[0].first;
  matrix.copies = static_cast<int>(copies.size());
  matrix.w = {.n = 2 * round_up(static_cast<int>(first.rows), 32), .k = static_cast<int>(first.columns),
              .format = packed_format(first)};
  for (const auto& [gate, up] : copies) {
    for (const StoredMatrix* m : {&gate, &up}) {
      if (packed_format(*m) != matrix.w.format)
        fail("{}: {} is stored as {}, but {} as {}: gate and up projections of all experts must agree", m->values->file,
             m->values->name, stored_name(m->values->dtype), first.values->name, stored_name(first.values->dtype));
      add_sources(matrix, *m);
    }
  }
  matrix.pack = [copies = std::move(copies)](int copy, int panel, std::byte* codes, std::byte* scales) {
    const StoredMatrix& m = panel % 2 ? copies[copy].second : copies[copy].first;
    pack_rows(m, panel / 2 * kPanel, codes, scales);  // beyond the rows: zeros
  };
  return matrix;
}

}  // namespace

Parts Builder::matrices(const std::string& label, const std::vector<Part>& parts, int k, int align) {
  Parts out;
  std::vector<StoredMatrix> run;
  const auto close = [&] {
    if (run.empty()) return;
    out.matrices.push_back(add_matrix(side_by_side(label, std::move(run), align)));
    run.clear();
  };
  for (const Part& part : parts) {
    StoredMatrix m = stored(part.name, part.rows, k);
    if (!run.empty() && packed_format(run.back()) != packed_format(m)) close();
    if (run.empty()) out.columns.push_back(out.width);
    out.offset.push_back(out.width);
    out.width += round_up(part.rows, align);
    run.push_back(m);
  }
  close();
  return out;
}

int Builder::head_matrix() {
  if (config.tie_embeddings) return add_matrix(side_by_side("lm_head", {stored("embed_tokens", config.vocab, config.hidden)}));
  // The head stands beside the model: "lm_head", or "language_model.lm_head".
  const std::string outer = prefix_;
  prefix_ = checkpoint_.find("language_model.lm_head.weight") ? "language_model." : "";
  const int matrix = add_matrix(side_by_side("lm_head", {stored("lm_head", config.vocab, config.hidden)}));
  prefix_ = outer;
  return matrix;
}

int Builder::pair_matrix(const std::string& label, const std::string& gate, const std::string& up, int rows, int k) {
  return add_matrix(interleaved(label, {{stored(gate, rows, k), stored(up, rows, k)}}));
}

int Builder::expert_pairs(const std::string& label, const std::vector<std::pair<std::string, std::string>>& names,
                          int rows, int k) {
  std::vector<std::pair<StoredMatrix, StoredMatrix>> copies;
  for (const auto& [gate, up] : names) copies.emplace_back(stored(gate, rows, k), stored(up, rows, k));
  return add_matrix(interleaved(label, std::move(copies)));
}

int Builder::experts(const std::string& label, const std::vector<std::string>& names, int rows, int k) {
  std::vector<StoredMatrix> copies;
  for (const std::string& name : names) copies.push_back(stored(name, rows, k));
  Matrix matrix;
  matrix.label = label;
  matrix.copies = static_cast<int>(copies.size());
  matrix.w = {.n = rows, .k = k, .format = packed_format(copies[0])};
  for (const StoredMatrix& m : copies) {
    if (packed_format(m) != matrix.w.format)
      fail("{}: {} is stored as {}, but {} as {}: all experts of a layer must agree", m.values->file, m.values->name,
           stored_name(m.values->dtype), copies[0].values->name, stored_name(copies[0].values->dtype));
    add_sources(matrix, m);
  }
  matrix.pack = [copies = std::move(copies)](int copy, int panel, std::byte* codes, std::byte* scales) {
    pack_rows(copies[copy], static_cast<int64_t>(panel) * kPanel, codes, scales);
  };
  return add_matrix(std::move(matrix));
}

int Builder::head_weights(const std::string& name, const MlaSpec& mla, HeadWeights which) {
  const int per_head = mla.nope + mla.v, R = mla.kv_lora;
  const StoredMatrix m = stored(name, static_cast<int64_t>(mla.heads) * per_head, R);
  // Heads cut, and transposing turns, the 128 x 128 scale blocks of FP8: it is widened, exactly.
  const WeightFormat format = packed_format(m) == WeightFormat::bf16 ? WeightFormat::bf16 : WeightFormat::f32;
  Matrix matrix;
  matrix.label = name;
  matrix.copies = mla.heads;
  add_sources(matrix, m);
  if (which == HeadWeights::absorb) {
    const int nope = mla.nope;
    matrix.w = {.n = R, .k = nope, .format = format};
    matrix.pack = [=](int head, int panel, std::byte* codes, std::byte*) {
      const int columns = std::min(kPanel, R - panel * kPanel);
      std::vector<float> rows(static_cast<size_t>(columns) * nope), part(columns);
      for (int k = 0; k < nope; ++k) {
        read_row(m, static_cast<int64_t>(head) * per_head + k, static_cast<int64_t>(panel) * kPanel, columns, part.data());
        for (int c = 0; c < columns; ++c) rows[static_cast<size_t>(c) * nope + k] = part[c];
      }
      pack_values(format, rows.data(), columns, nope, codes);
    };
    return add_matrix(std::move(matrix));
  }
  const int first = which == HeadWeights::values ? mla.nope : 0, n = which == HeadWeights::values ? mla.v : mla.nope;
  matrix.w = {.n = n, .k = R, .format = format};
  matrix.pack = [=](int head, int panel, std::byte* codes, std::byte*) {
    const int columns = std::min(kPanel, n - panel * kPanel);
    std::vector<float> rows(static_cast<size_t>(columns) * R);
    for (int c = 0; c < columns; ++c)
      read_row(m, static_cast<int64_t>(head) * per_head + first + panel * kPanel + c, 0, R,
               rows.data() + static_cast<size_t>(c) * R);
    pack_values(format, rows.data(), columns, R, codes);
  };
  return add_matrix(std::move(matrix));
}

Slot Builder::vector(const std::string& label, size_t count, std::vector<const TensorInfo*> sources,
                     std::function<void(float*)> fill) {
  // Kernels load whole vectors of 16: the pad must exist.
  Vector v{label, static_cast<size_t>(round_up(static_cast<int>(count), 16)), graph.external(label), std::move(fill),
           std::move(sources)};
  weights.vectors.push_back(std::move(v));
  return weights.vectors.back().slot;
}

Slot Builder::norm_weight(const std::string& name, int width) {
  const TensorInfo& t = tensor({name + ".weight", name}, {width});
  return vector(name, width, {&t}, [&t, width](float* out) { read_f32(t, 0, width, out); });
}

Val Builder::make_rows(const std::string& label, int rows, int width, int element_bytes) {
  const int ld = pitch(width, element_bytes);
  return {graph.value(label, static_cast<size_t>(rows) * ld * element_bytes + 64), width, ld, 0, element_bytes};
}
Val Builder::f32_rows(const std::string& label, int width, Rows rows) {
  return make_rows(label, row_capacity(rows), width, 4);
}
Val Builder::op_rows(const std::string& label, int width, Rows rows) {
  return make_rows(label, row_capacity(rows), width, op_bytes());
}
Val Builder::expert_rows(const std::string& label, int width, bool op) {
  return make_rows(label, row_capacity(Rows::tokens) * config.moe.top_k + 16, width, op ? op_bytes() : 4);
}
Val Builder::raw_rows(const std::string& label, int width) {
  return {graph.value(label, static_cast<size_t>(row_capacity(Rows::tokens)) * width * 4 + 64), width, width, 0, 4};
}
Val Builder::view(const Val& v, int offset, int width) {
  Val out = v;
  out.offset += offset;
  out.width = width;
  return out;
}

Normed Builder::normed_rows(const std::string& label, int width, bool want_f32, Rows rows) {
  Normed out;
  out.op = op_rows(label, width, rows);
  if (!kernels.bf16_operands) out.f32 = out.op;
  else if (want_f32) out.f32 = f32_rows(label + " f32", width, rows);
  return out;
}

Normed Builder::norm(const std::string& name, const Val& x, int width, float eps, int site, bool want_f32, Rows rows) {
  const Normed out = normed_rows(name + " normed", width, want_f32, rows);
  auto n = graph.make<NormArgs>("norm", name, kernels.norm);
  n->ld_x = x.ld, n->width = width, n->eps = eps, n->rows = rows, n->site = site;
  n.at(n->x, x).at(n->weight, norm_weight(name, width));
  write_normed(n, out);
  n.add();
  return out;
}

void Builder::product(const std::string& label, const Val& a, bool precise, int matrix, Epilogue epilogue,
                      const Val& out, Rows rows, int slack) {
  const Matrix& m = weights.matrices[matrix];
  auto g = graph.make<GemmArgs>("gemm", label, kernels.gemm);
  g->ld_a = a.ld, g->precise = precise, g->epilogue = epilogue, g->rows = rows, g->groups = 1;
  g->w = m.w, g->ld_out = out.ld;
  const int n = epilogue == Epilogue::activate ? m.w.n / 2 : m.w.n;
  if (epilogue != Epilogue::store_f32 && epilogue != Epilogue::add_f32) g->out_pad = round_up(n + slack, kStep) - n;
  if (epilogue == Epilogue::activate) g->act = activation();
  g.at(g->a, a).at(g->w.codes, m.codes).at(g->w.scales, m.scales).at(g->out, out);
  g.add();
}

Val Builder::linear(const Normed& a, const Parts& parts, const std::string& label, bool op_out) {
  // Heads of an operand row are inputs of products themselves: the last one may read a whole step past its end.
  const int slack = op_out ? kStep : 0;
  const Val out = op_out ? op_rows(label, parts.width + slack) : f32_rows(label, parts.width);
  for (size_t i = 0; i < parts.matrices.size(); ++i)
    product(label, a.op, false, parts.matrices[i], op_out ? Epilogue::store_op : Epilogue::store_f32,
            view(out, parts.columns[i], parts.width - parts.columns[i]), Rows::tokens, slack);
  return out;
}

void Builder::into(const Sink& sink, const std::string& label, const Val& a, const Parts& parts) {
  WEFT_CHECK(parts.matrices.size() == 1);
  product(label, a, false, parts.matrices[0], sink.add ? Epilogue::add_f32 : Epilogue::store_f32, sink.out);
}

void Builder::trace(const std::string& name, const Val& x, int width, Rows rows) {
  if (!options.trace) return;
  const int words = width * x.element_bytes / 4;  // bf16 rows travel as pairs; their widths are even
  TraceBuffer buffer{graph.external("trace " + name), words, rows};
  auto c = graph.make<CopyArgs>("copy", "trace " + name, kernels.copy);
  c->ld_x = x.ld * x.element_bytes / 4, c->width = words, c->rows = rows, c->ld_out = words;
  c.at(c->x, x).at(c->out, buffer.slot);
  c.add();
  traces[name] = buffer;
}

int Builder::add_slab(const std::string& label, size_t bytes_per_page) {
  caches.slab_bytes.push_back((bytes_per_page + 63) & ~size_t{63});
  caches.slabs.push_back(graph.external(label));
  return static_cast<int>(caches.slabs.size()) - 1;
}

Slot Builder::add_state(const std::string& label, size_t bytes) {
  const Slot slot = graph.external(label);
  caches.states.emplace_back(slot, caches.slot_bytes);
  caches.slot_bytes += (bytes + 63) & ~size_t{63};
  return slot;
}

}  // namespace weft
