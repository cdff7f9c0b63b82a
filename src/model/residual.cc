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

// Block Attention Residuals (kimi.md 6.2): a bank of snapshots and a running prefix P. A restart pushes P
// itself into the bank and begins a new one, so a snapshot costs no copy.
//
// Sites that see one bank can be mixed in two stages, a group of sites at a time: their sums over the bank,
// which read each snapshot once, then P folded in at each site. The sums have one place: a group is made when
// the one before is read.
class AttnRes : public ResidualPath {
 public:
  explicit AttnRes(Builder& b) : b_(b) {}
  void begin() override { prefix_ = embed(b_, 1); }

  Normed mix(const Site& site, bool want_f32) override {
    if (site.number() >= last_) sum_bank(site.number());
    const Normed out = mix_sources(site.number(), site.scope + site.norm, want_f32, Rows::tokens,
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
  Normed end() override { return mix_sources(final_site(b_), "norm", true, Rows::logits, "final_mix"); }
  Val current() const override { return prefix_; }
  int width() const override { return b_.config.hidden; }

 private:
  std::string query_name(int site) const {
    if (site == final_site(b_)) return "output_attn_res";
    return fmt::format("layers.{}.{}", site / 2, site % 2 ? "mlp_res" : "self_attention_res");
  }
  Slot query(int site) {
    if (queries_.contains(site)) return queries_[site];
    const int D = b_.config.hidden;
    const std::string name = query_name(site);
    const TensorInfo& n = b_.tensor({name + "_norm.weight"}, {D});
    const TensorInfo& p = b_.tensor({name + "_proj.weight"}, {1, D});
    return queries_[site] =
               b_.vector(name, D, {&n, &p}, [&n, &p, D](float* out) {  // only the product matters
                 std::vector<float> other(D);
                 read_f32(n, 0, D, out);
                 read_f32(p, 0, D, other.data());
                 for (int i = 0; i < D; ++i) out[i] *= other[i];
               });
  }

  // Rows that move for a site: n and P, against n / sites and P and the sum, which is written and read.
  // Measured, that sum costs 1.8 (docs/design.md): with 12 sites two stages pay from 2 blocks on, with 2
  // sites from 4.
  bool in_two_stages(int n, int sites) const {
    if (n == 0 || b_.options.mix == MixForm::one_stage) return false;
    return b_.options.mix == MixForm::two_stages || n > 1.8 + static_cast<double>(n) / sites;
  }

  // The first stage of the sites from this one on, up to the next restart's attention, which still sees this
  // bank. The last mix is of few rows and stays by itself.
  void sum_bank(int site) {
    const int block = b_.config.attn_res_block, D = b_.config.hidden;
    const int left = std::min(2 * block * ((site - 1) / 2 / block + 1) + 1, final_site(b_)) - site;
    const int groups = (left + kMaxBankSites - 1) / kMaxBankSites, sites = (left + groups - 1) / groups;
    if (!in_two_stages(static_cast<int>(bank_.size()), sites)) return;
    row_ = round_up(D, 16) + 16;
    if (!sums_) sums_ = b_.f32_rows("sums of finished blocks", std::min(kMaxBankSites, 2 * block) * row_);
    auto m = b_.graph.make<MixBankArgs>("mix_bank", query_name(site), b_.kernels.mix_bank);
    m->sources = static_cast<int>(bank_.size()), m->ld = bank_[0].ld, m->sites = sites, m->width = D;
    m->mix_eps = b_.config.norm_eps, m->ld_out = sums_.ld, m->row = row_;
    for (size_t i = 0; i < bank_.size(); ++i) m.at(m->source[i], bank_[i]);
    for (int i = 0; i < sites; ++i) m.at(m->query[i], query(site + i));
    m.at(m->out, sums_);
    m.add();
    first_ = site, last_ = site + sites;
  }

  Normed mix_sources(int site, const std::string& norm, bool want_f32, Rows rows, const std::string& trace) {
    const int D = b_.config.hidden;
    const Slot w = query(site);
    const Normed out = b_.normed_rows(norm + " normed", D, want_f32, rows);
    auto m = b_.graph.make<MixArgs>("mix", query_name(site), b_.kernels.mix);
    if (site >= first_ && site < last_) {
      m.at(m->bank, Builder::view(sums_, (site - first_) * row_, row_));
      m->ld_bank = sums_.ld;
    } else {
      for (const Val& snapshot : bank_) m.at(m->source[m->sources++], snapshot);
    }
    WEFT_CHECK(m->sources < kMaxSources);
    m.at(m->source[m->sources++], prefix_);
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
  Val prefix_, sums_;
  std::map<int, Slot> queries_;  // by site
  int first_ = 0, last_ = 0;     // sites that sums_ holds
  int row_ = 0;                  // elements between two sites' sums
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
