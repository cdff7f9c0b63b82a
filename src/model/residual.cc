#include "model/residual.h"

namespace weft {
namespace {

Val embed(Builder& b, int copies) {
  const int D = b.config.hidden, vocab = b.config.vocab;
  const TensorInfo& t = b.tensor({"embed_tokens.weight"}, {vocab, D});
  const bool bf16 = t.dtype == StoredDtype::bf16;
  const size_t row = static_cast<size_t>(D) * (bf16 ? 2 : 4);
  Table table{"embed_tokens", row * vocab, b.graph.external("embed_tokens"), {}, static_cast<size_t>(vocab), {&t}};
  table.fill = [&t, bf16, D](size_t first, size_t rows, std::byte* out) {
    if (bf16) read_elements(t, first * D, rows * D, reinterpret_cast<uint16_t*>(out));
    else read_f32(t, first * D, rows * D, reinterpret_cast<float*>(out));
  };
  const Val x = b.f32_rows("embedding", copies * D);
  auto e = b.graph.make<EmbedArgs>("embed", "embed_tokens", b.kernels.embed);
  e->bf16 = bf16, e->width = D, e->copies = copies, e->ld_out = x.ld;
  e.at(e->table, table.slot).at(e->out, x);
  e.add();
  b.weights.tables.push_back(std::move(table));
  return x;
}

int final_site(const Builder& b) { return 2 * b.config.num_layers(); }

// x += f(norm(x))
class Plain : public ResidualPath {
 public:
  explicit Plain(Builder& b) : b_(b) {}
  void begin() override { x_ = embed(b_, 1); }
  Normed mix(const Site& site, bool want_f32) override {
    return b_.norm(site.scope + site.norm, x_, b_.config.hidden, b_.config.norm_eps, site.number(), want_f32);
  }
  Sink sink(const Site&) override { return {x_, true}; }
  void add(const Site&, const Sink&) override {}
  Normed end() override {
    return b_.norm("norm", x_, b_.config.hidden, b_.config.norm_eps, final_site(b_), true, Rows::logits);
  }
  Val current() const override { return x_; }
  int width() const override { return b_.config.hidden; }

 private:
  Builder& b_;
  Val x_;
};

// Block Attention Residuals (kimi.md 6.2): a bank of snapshots and a running prefix P. A restart pushes P itself into
// the bank and begins a new one, so a snapshot costs no copy.
class AttnRes : public ResidualPath {
 public:
  explicit AttnRes(Builder& b) : b_(b) {}
  void begin() override { prefix_ = embed(b_, 1); }

  Normed mix(const Site& site, bool want_f32) override {
    const std::string query = site.scope + (site.ffn ? "mlp_res" : "self_attention_res");
    const Normed out = mix_sources(query, site.scope + site.norm, site.number(), want_f32, Rows::tokens,
                                fmt::format("{}.{}", site.ffn ? "mlp_in" : "attn_in", site.layer));
    if (!site.ffn && site.layer % b_.config.attn_res_block == 0) {
      bank_.push_back(prefix_);
      prefix_ = {};
    }
    return out;
  }
  Sink sink(const Site& site) override {
    if (prefix_) return {prefix_, true};
    prefix_ = b_.f32_rows(fmt::format("prefix {}", site.layer), b_.config.hidden);
    return {prefix_, false};
  }
  void add(const Site&, const Sink&) override {}
  Normed end() override { return mix_sources("output_attn_res", "norm", final_site(b_), true, Rows::logits, "final_mix"); }
  Val current() const override { return prefix_; }
  int width() const override { return b_.config.hidden; }

 private:
  Normed mix_sources(const std::string& query, const std::string& norm, int site, bool want_f32, Rows rows,
                  const std::string& trace) {
    const int D = b_.config.hidden;
    const TensorInfo& n = b_.tensor({query + "_norm.weight"}, {D});
    const TensorInfo& p = b_.tensor({query + "_proj.weight"}, {1, D});
    const Slot w = b_.vector(query, D, {&n, &p}, [&n, &p, D](float* out) {  // only the product matters
      std::vector<float> other(D);
      read_f32(n, 0, D, out);
      read_f32(p, 0, D, other.data());
      for (int i = 0; i < D; ++i) out[i] *= other[i];
    });
    const Normed out = b_.normed_rows(norm + " normed", D, want_f32, rows);
    auto m = b_.graph.make<MixArgs>("mix", query, b_.kernels.mix);
    m->sources = static_cast<int>(bank_.size()) + 1;
    WEFT_CHECK(m->sources <= kMaxSources);
    for (size_t i = 0; i < bank_.size(); ++i) m.at(m->source[i], bank_[i]);
    m.at(m->source[bank_.size()], prefix_);
    m->ld = prefix_.ld, m->width = D, m->mix_eps = b_.config.norm_eps, m->eps = b_.config.norm_eps;
    m->rows = rows, m->site = site;
    m.at(m->query, w).at(m->norm, b_.norm_weight(norm, D));
    b_.write_normed(m, out);
    if (b_.options.trace) {
      TraceBuffer buffer{b_.graph.external("trace " + trace), D, rows};
      m.at(m->out_mix, buffer.slot);
      b_.traces[trace] = buffer;
    }
    m.add();
    return out;
  }

  Builder& b_;
  std::vector<Val> bank_;
  Val prefix_;
};

// Hyper-connections (glm5_next.md 3.1): n streams, a map read from all of them at every site.
class Hyper : public ResidualPath {
 public:
  explicit Hyper(Builder& b) : b_(b) {}
  void begin() override { x_ = embed(b_, b_.config.hc_streams); }

  Normed mix(const Site& site, bool want_f32) override {
    const int D = b_.config.hidden, n = b_.config.hc_streams, outputs = n * (2 + n);
    const std::string name = site.scope + (site.ffn ? "hc_ffn_" : "hc_attn_");
    const Parts map = b_.matrices(name + "fn", {{name + "fn", outputs}}, n * D);
    const Val mapped = b_.f32_rows(name + "map", outputs);
    b_.product(name + "fn", x_, true, map.matrices[0], Epilogue::store_f32, mapped);
    keep_ = b_.raw_rows(name + "keep", 32);
    const Normed out = b_.normed_rows(name + "normed", D, want_f32);
    auto h = b_.graph.make<HcPreArgs>("hc_pre", name, b_.kernels.hc_pre);
    h->ld_x = x_.ld, h->ld_map = mapped.ld, h->streams = n, h->width = D, h->iterations = b_.config.hc_sinkhorn_iters;
    h->eps = b_.config.norm_eps, h->hc_eps = b_.config.hc_eps, h->site = site.number();
    h.at(h->x, x_).at(h->map, mapped).at(h->scale, b_.norm_weight(name + "scale", 3));
    h.at(h->base, b_.norm_weight(name + "base", outputs)).at(h->norm, b_.norm_weight(site.scope + site.norm, D));
    h.at(h->keep, keep_);
    b_.write_normed(h, out);
    h.add();
    return out;
  }
  Sink sink(const Site& site) override { return {b_.f32_rows(site.scope + "sub-layer", b_.config.hidden), false}; }
  void add(const Site& site, const Sink& sink) override {
    auto h = b_.graph.make<HcPostArgs>("hc_post", site.scope, b_.kernels.hc_post);
    h->ld_x = x_.ld, h->ld_y = sink.out.ld, h->streams = b_.config.hc_streams, h->width = b_.config.hidden;
    h.at(h->x, x_).at(h->y, sink.out).at(h->keep, keep_);
    h.add();
  }
  Normed end() override {
    const Val mean = b_.f32_rows("stream mean", b_.config.hidden, Rows::logits);
    auto h = b_.graph.make<HcEndArgs>("hc_end", "stream mean", b_.kernels.hc_end);
    h->ld_x = x_.ld, h->streams = b_.config.hc_streams, h->width = b_.config.hidden, h->rows = Rows::logits;
    h->ld_out = mean.ld;
    h.at(h->x, x_).at(h->out, mean);
    h.add();
    return b_.norm("norm", mean, b_.config.hidden, b_.config.norm_eps, final_site(b_), true, Rows::compact);
  }
  Val current() const override { return x_; }
  int width() const override { return b_.config.hc_streams * b_.config.hidden; }

 private:
  Builder& b_;
  Val x_, keep_;
};

}  // namespace

std::unique_ptr<ResidualPath> make_residual(Builder& builder) {
  switch (builder.config.residual) {
    case Residual::plain: return std::make_unique<Plain>(builder);
    case Residual::attn_res: return std::make_unique<AttnRes>(builder);
    case Residual::hyper: return std::make_unique<Hyper>(builder);
  }
  return nullptr;
}

}  // namespace weft
