#include "model/layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "kernels/attention_plan.h"
#include "kernels/index_plan.h"
#include "model/builder.h"
#include "model/mla_form.h"
#include "model/residual.h"

namespace weft {
namespace {

RopeMode rope_mode(RopePairs pairs) {
  return pairs == RopePairs::interleaved  ? RopeMode::interleaved
         : pairs == RopePairs::half_split ? RopeMode::half_split
                                          : RopeMode::none;
}

// Frequencies per pair (dsa.md 1.1): YaRN blends 1/factor of them below the corrected band.
std::vector<double> inverse_frequencies(const RopeSpec& rope, int dims) {
  std::vector<double> freq(dims / 2);
  const auto corrected = [&](double rotations) {
    return dims * std::log(rope.original_positions / (rotations * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
  };
  double low = 0, high = 0;
  if (rope.yarn) {
    low = std::max(std::floor(corrected(rope.beta_fast)), 0.0);
    high = std::min(std::ceil(corrected(rope.beta_slow)), dims - 1.0);
    if (low == high) high += 0.001;
  }
  for (int j = 0; j < dims / 2; ++j) {
    freq[j] = std::pow(static_cast<double>(rope.theta), -2.0 * j / dims);
    if (!rope.yarn) continue;
    const double ramp = std::clamp((j - low) / (high - low), 0.0, 1.0);
    freq[j] = freq[j] / rope.factor * ramp + freq[j] * (1 - ramp);
  }
  return freq;
}

double yarn_mscale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

// Reads of MLA and indexer rotate with the same table when they have the same number of dims.
class RopeTables {
 public:
  explicit RopeTables(Builder& b) : b_(b) {}
  Val get(int dims) {
    for (const auto& [d, val] : made_)
      if (d == dims) return val;
    const RopeSpec& rope = b_.config.rope;
    const Val table = b_.raw_rows(fmt::format("rope {}", dims), dims);
    const Slot freq = b_.vector(fmt::format("inverse frequencies {}", dims), dims, {}, [&rope, dims](float* out) {
      const std::vector<double> f = inverse_frequencies(rope, dims);
      std::memcpy(out, f.data(), f.size() * sizeof(double));
    });
    auto r = b_.graph.make<RopeTableArgs>("rope_table", fmt::format("rope {}", dims), b_.kernels.rope_table);
    r->pairs = dims / 2;
    // As in DeepSeek's code and transformers: mscale defaults to 1, an absent mscale_all_dim does not divide.
    if (rope.yarn) {
      const double above = yarn_mscale(rope.factor, rope.mscale > 0 ? rope.mscale : 1);
      const double below = rope.mscale_all_dim > 0 ? yarn_mscale(rope.factor, rope.mscale_all_dim) : 1;
      r->scale = static_cast<float>(above / below);
    } else {
      r->scale = 1;
    }
    r.at(r->inv_freq, freq).at(r->out, table);
    r.add();
    made_.emplace_back(dims, table);
    return table;
  }

 private:
  Builder& b_;
  std::vector<std::pair<int, Val>> made_;
};

struct Stack {
  Builder& b;
  const ModelConfig& c;
  const StackNames& names;
  ResidualPath& residual;
  RopeTables ropes;
  Val list, count;  // the last selection, for layers that share it
};

// Conv filters [channels, 1, taps] of q, k, v as [taps][stride].
Slot conv_weight(Builder& b, const std::string& scope, const KdaSpec& kda, int stride) {
  const int P = kda.heads * kda.head_dim, taps = kda.conv_width;
  std::vector<const TensorInfo*> sources;
  for (const char* name : {"q_conv1d", "k_conv1d", "v_conv1d"}) {
    const std::string full = scope + name + ".weight";
    const TensorInfo* t = b.find(full);
    sources.push_back(t && t->shape.size() == 2 ? &b.tensor({full}, {P, taps}) : &b.tensor({full}, {P, 1, taps}));
  }
  return b.vector(scope + "conv1d", static_cast<size_t>(taps) * stride, sources, [=](float* out) {
    std::vector<float> w(static_cast<size_t>(P) * taps);
    for (int i = 0; i < 3; ++i) {
      read_f32(*sources[i], 0, w.size(), w.data());
      for (int ch = 0; ch < P; ++ch)
        for (int tap = 0; tap < taps; ++tap) out[tap * stride + i * P + ch] = w[static_cast<size_t>(ch) * taps + tap];
    }
  });
}

// A_log may be stored longer than the heads (K3: 128 for 96), and as [1, 1, heads, 1]: the first `heads` count.
Slot decay_slope(Builder& b, const std::string& scope, int heads) {
  const TensorInfo* t = b.find(scope + "A_log");
  if (!t) b.tensor({scope + "A_log"}, {heads});  // fails
  if (t->elements() < static_cast<size_t>(heads))
    fail("{}: {}: {} values for {} heads", t->file, t->name, t->elements(), heads);
  const TensorInfo& a_log = b.tensor({scope + "A_log"}, t->shape);
  return b.vector(scope + "A_log", heads, {&a_log}, [&a_log, heads](float* out) {
    read_f32(a_log, 0, heads, out);
    for (int h = 0; h < heads; ++h) out[h] = std::exp(out[h]);
  });
}

void kda_layer(Stack& s, const Site& site) {
  Builder& b = s.b;
  const KdaSpec& kda = s.c.kda;
  const int D = s.c.hidden, H = kda.heads, K = kda.head_dim, P = H * K, rank = K;
  const std::string scope = site.scope + "self_attn.";
  const Normed x = s.residual.mix(site, false);

  std::vector<Builder::Part> wide = {{scope + "q_proj", P}, {scope + "k_proj", P}, {scope + "v_proj", P},
                                     {scope + "b_proj", H}};
  std::vector<Builder::Part> narrow = {{scope + "f_a_proj", rank}};
  if (kda.full_rank_gate) wide.push_back({scope + "g_proj", P});
  else narrow.push_back({scope + "g_a_proj", rank});
  const Parts in = b.matrices(scope + "qkv", wide, D), low = b.matrices(scope + "f_a", narrow, D, kStep);

  // The small products come first: two in a row leave a thread idle unless the large one is still to do.
  const Val rank_rows = b.linear(x, low, scope + "f_a", true);
  const auto expand = [&](const char* name, int part) {
    const Parts up = b.matrices(scope + name, {{scope + name, P}}, rank);
    const Val out = b.op_rows(scope + name, P);
    b.product(scope + name, Builder::view(rank_rows, low.offset[part], rank), false, up.matrices[0],
              Epilogue::store_op, out);
    return out;
  };
  const Val decay = expand("f_b_proj", 0);
  const Val low_gate = kda.full_rank_gate ? Val{} : expand("g_b_proj", 1);
  const Val qkv = b.linear(x, in, scope + "qkv", true);
  const Val gate = kda.full_rank_gate ? Builder::view(qkv, in.offset[4], P) : low_gate;

  const int v_stride = round_up(K, kPanel), conv_stride = round_up(3 * P, kPanel);
  const size_t state_bytes = static_cast<size_t>(H) * K * v_stride * 4;
  const size_t tail_bytes = static_cast<size_t>(kda.conv_width - 1) * conv_stride * 4;
  const Slot state = b.add_state(scope + "state", state_bytes + tail_bytes);
  b.caches.recurrent = true;
  b.caches.kda_bytes += state_bytes + tail_bytes;

  const TensorInfo& bias = b.tensor({scope + "dt_bias"}, {P});
  const Val out = b.op_rows(scope + "kda", P);
  auto k = b.graph.make<KdaArgs>("kda", scope + "kda", b.kernels.kda);
  k->ld_qkv = qkv.ld, k->k_offset = in.offset[1], k->v_offset = in.offset[2];
  k->ld_decay = decay.ld, k->ld_beta = qkv.ld, k->ld_gate = gate.ld, k->conv_stride = conv_stride;
  k->tail_offset = state_bytes, k->heads = H, k->key_dim = K, k->value_dim = K, k->v_stride = v_stride;
  k->taps = kda.conv_width, k->bounded = kda.bounded_gate, k->lower_bound = kda.lower_bound;
  k->norm_eps = s.c.norm_eps, k->ld_out = out.ld;
  k.at(k->qkv, qkv).at(k->decay, decay).at(k->beta, Builder::view(qkv, in.offset[3], H)).at(k->gate, gate);
  k.at(k->conv, conv_weight(b, scope, kda, conv_stride)).at(k->slope, decay_slope(b, scope, H));
  k.at(k->bias, b.vector(scope + "dt_bias", P, {&bias}, [&bias, P](float* o) { read_f32(bias, 0, P, o); }));
  k.at(k->norm, b.norm_weight(scope + "o_norm", K)).at(k->state, state).at(k->out, out);
  k.add();

  const Sink sink = s.residual.sink(site);
  b.into(sink, scope + "o_proj", out, b.matrices(scope + "o_proj", {{scope + "o_proj", D}}, P));
  s.residual.add(site, sink);
}

// Selection of one DSA layer: index keys into the cache, scores, top-k.
struct Indexer {
  Val q;        // operand [tokens, heads * dim], rotated
  Val weights;  // f32 [tokens, heads]
  int slab;
};

void begin_list(Stack& s, const std::string& scope) {
  s.b.selection_width = s.c.indexer.topk + s.c.indexer.pool - 1;
  s.list = s.b.raw_rows(scope + "selection", s.b.selection_width);
  s.count = s.b.raw_rows(scope + "selected", 1);
}

void select(Stack& s, const std::string& scope, const Indexer& in) {
  Builder& b = s.b;
  const IndexerSpec& ix = s.c.indexer;
  begin_list(s, scope);
  auto n = b.graph.make<IndexArgs>("index", scope + "indexer", b.kernels.index);
  n->ld_q = in.q.ld, n->ld_weight = in.weights.ld, n->heads = ix.heads, n->dim = ix.dim, n->topk = ix.topk;
  n->scale = 1.f / std::sqrt(static_cast<float>(ix.heads) * static_cast<float>(ix.dim));
  n->pool = ix.pool, n->page_bytes = b.caches.slab_bytes[in.slab], n->layer = b.dsa_layers++;
  n->width = b.selection_width;
  n->format = b.options.index_cache;
  const size_t best = static_cast<size_t>(ix.topk / ix.pool);
  const auto lists = [&](const char* what, size_t each) {
    return b.graph.value(scope + what, kIndexLists * each * 4);
  };
  const Slot score = lists("part scores", best), index = lists("part indices", best), count = lists("part counts", 1);
  const auto point = [&](auto& node, IndexArgs& a) {
    node.at(a.q, in.q).at(a.weight, in.weights).at(a.slab, b.slab(in.slab)).at(a.out, s.list).at(a.count, s.count);
    node.at(a.part_score, score).at(a.part_index, index).at(a.part_count, count);
  };
  point(n, *n.operator->());
  auto m = b.graph.make<IndexMergeArgs>("index_merge", scope + "indexer", b.kernels.index_merge);
  m->index = *n.operator->();
  point(m, m->index);
  n.add();
  m.add();
}

void select_recent(Stack& s, const std::string& scope) {
  begin_list(s, scope);
  auto n = s.b.graph.make<RecentArgs>("recent", scope + "recent", s.b.kernels.recent);
  n->layer = s.b.dsa_layers++, n->width = s.b.selection_width;
  n.at(n->out, s.list).at(n->count, s.count);
  n.add();
}

// Key side of the indexer: LayerNorm, rope, pooling, cache.
int index_keys(Stack& s, const std::string& scope, const Val& key, const Val& pool_gate) {
  Builder& b = s.b;
  const IndexerSpec& ix = s.c.indexer;
  const int keys = kPageTokens / ix.pool, panels = (keys + kPanel - 1) / kPanel;
  const size_t page = panels * index_panel_bytes(b.options.index_cache, ix.dim, b.op_bytes());
  const int slab = b.add_slab(scope + "index keys", page);
  b.caches.index_bytes += b.caches.slab_bytes[slab];
  auto n = b.graph.make<IndexKeyArgs>("index_key", scope + "indexer.wk", b.kernels.index_key);
  n->ld_key = key.ld, n->ld_gate = pool_gate.ld, n->eps = ix.norm_eps, n->dim = ix.dim, n->rope = ix.rope;
  n->pool = ix.pool, n->mode = rope_mode(ix.rope_pairs), n->page_bytes = b.caches.slab_bytes[slab];
  n->format = b.options.index_cache;
  if (ix.rope) n.at(n->table, s.ropes.get(ix.rope));
  if (ix.pool > 1) {
    const TensorInfo& ape = b.tensor({scope + "indexer.index_kpool_compress_ape"}, {ix.pool, ix.dim});
    const int count = ix.pool * ix.dim;
    n.at(n->ape, b.vector(scope + "ape", count, {&ape}, [&ape, count](float* o) { read_f32(ape, 0, count, o); }));
    n.at(n->pool_gate, pool_gate);
    n.at(n->ring, b.add_state(scope + "k-pool ring", static_cast<size_t>(ix.pool) * 2 * ix.dim * 4));
  }
  const std::string bias_name = scope + "indexer.k_norm.bias";
  Slot bias;
  if (ix.norm_bias_optional && !b.find(bias_name)) {
    bias = b.vector(bias_name, ix.dim, {}, [](float*) {});  // memory is zero
  } else {
    const TensorInfo& t = b.tensor({bias_name}, {ix.dim});
    bias = b.vector(bias_name, ix.dim, {&t}, [&t, dim = ix.dim](float* o) { read_f32(t, 0, dim, o); });
  }
  n.at(n->key, key).at(n->norm, b.norm_weight(scope + "indexer.k_norm", ix.dim)).at(n->norm_bias, bias);
  n.at(n->slab, b.slab(slab));
  n.add();
  return slab;
}

void rotate(Stack& s, const std::string& label, const Val& x, int x_head, const Val& out, int out_head, int heads,
            int dims, RopePairs pairs) {
  auto r = s.b.graph.make<RopeArgs>("rope", label, s.b.kernels.rope);
  r->ld_x = x.ld, r->x_head = x_head, r->ld_out = out.ld, r->out_head = out_head, r->heads = heads, r->dims = dims;
  r->mode = rope_mode(pairs);
  r.at(r->x, x).at(r->out, out);
  if (pairs != RopePairs::none) r.at(r->table, s.ropes.get(dims));
  r.add();
}

void mla_layer(Stack& s, const Site& site, const LayerSpec& layer) {
  Builder& b = s.b;
  const MlaSpec& mla = s.c.mla;
  const IndexerSpec& ix = s.c.indexer;
  const int D = s.c.hidden, H = mla.heads, R = mla.kv_lora, head = mla.nope + mla.rope;
  const std::string scope = site.scope + "self_attn.";
  const DsaMode dsa = b.options.dsa;
  const bool indexed = layer.own_indexer && dsa == DsaMode::sparse;
  const bool selects = (layer.own_indexer || layer.shared_index) && dsa != DsaMode::dense;
  const Normed x = s.residual.mix(site, indexed);

  // One product from the layer's input: latents, index key, gates.
  std::vector<Builder::Part> parts = {{scope + "kv_a_proj_with_mqa", R + mla.rope}};
  const auto add = [&](const std::string& name, int rows) {
    parts.push_back({scope + name, rows});
    return static_cast<int>(parts.size()) - 1;
  };
  const int q_a = mla.q_lora ? add("q_a_proj", mla.q_lora) : -1;
  const int gate = mla.output_gate ? add("g_proj", H * mla.v) : -1;
  const int wk = indexed ? add("indexer.wk", ix.dim) : -1;
  const int pool_gate = indexed && ix.pool > 1 ? add("indexer.index_kpool_compress_gate", ix.dim) : -1;
  const Parts in = b.matrices(scope + "down", parts, D);
  const Val down = b.linear(x, in, scope + "down", false);
  const auto part = [&](int i) { return Builder::view(down, in.offset[i], parts[i].rows); };

  const int row = round_up(R + mla.rope, kStep);
  const LatentFormat format = b.options.latent_cache;
  const int slab =
      b.add_slab(scope + "latent", kPageTokens * latent_row_bytes(format, R, mla.rope, b.op_bytes()));
  b.caches.latent_bytes += b.caches.slab_bytes[slab];
  {
    auto l = b.graph.make<LatentArgs>("latent", scope + "kv_a_layernorm", b.kernels.latent);
    l->ld_kv = down.ld, l->eps = mla.latent_norm_eps, l->latent = R, l->rope = mla.rope;
    l->mode = rope_mode(mla.rope_pairs), l->page_bytes = b.caches.slab_bytes[slab], l->format = format;
    l.at(l->kv, part(0)).at(l->norm, b.norm_weight(scope + "kv_a_layernorm", R)).at(l->slab, b.slab(slab));
    if (mla.rope && mla.rope_pairs != RopePairs::none) l.at(l->table, s.ropes.get(mla.rope));
    l.add();
  }

  // Queries of attention and indexer from the same normed low-rank vector.
  Normed query = x;
  if (mla.q_lora)
    query = b.norm(scope + "q_a_layernorm", part(q_a), mla.q_lora, mla.latent_norm_eps, site.number() + 1, false);
  std::vector<Builder::Part> heads = {{scope + (mla.q_lora ? "q_b_proj" : "q_proj"), H * head}};
  if (indexed) heads.push_back({scope + "indexer.wq_b", ix.heads * ix.dim});
  const Parts up = b.matrices(scope + "q", heads, mla.q_lora ? mla.q_lora : D);
  const Val q = b.linear(query, up, scope + "q", true);

  if (indexed) {
    Indexer indexer;
    indexer.slab = index_keys(s, scope, part(wk), pool_gate >= 0 ? part(pool_gate) : Val{});
    indexer.q = Builder::view(q, up.offset[1], ix.heads * ix.dim);
    if (ix.rope)
      rotate(s, scope + "indexer rope", indexer.q, ix.dim, indexer.q, ix.dim, ix.heads, ix.rope, ix.rope_pairs);
    // bf16 products would flip near ties of the ranking
    const Parts w = b.matrices(scope + "weights_proj", {{scope + "indexer.weights_proj", ix.heads}}, D);
    indexer.weights = b.f32_rows(scope + "weights", ix.heads);
    b.product(scope + "weights_proj", x.f32, true, w.matrices[0], Epilogue::store_f32, indexer.weights);
    select(s, scope, indexer);
  } else if (selects && layer.own_indexer) {
    select_recent(s, scope);
  }

  // Absorbed queries: W_UK^T q_nope beside q_pe.
  const Val absorbed = b.op_rows(scope + "absorbed", H * row);
  const std::string kv_b = scope + "kv_b_proj";
  const int absorb = b.head_weights(kv_b, mla, HeadWeights::absorb), expand = b.head_weights(kv_b, mla, HeadWeights::values);
  const int below = expand_below(b.options.mla, s.c, selects);
  {
    const Matrix& m = b.weights.matrices[absorb];
    auto g = b.graph.make<GemmArgs>("gemm", scope + "W_UK", b.kernels.gemm);
    g->ld_a = q.ld, g->a_group = head, g->epilogue = Epilogue::store_op, g->groups = H, g->w = m.w;
    g->ld_out = absorbed.ld, g->out_group = row;
    g.at(g->a, q).at(g->w.codes, m.codes).at(g->out, absorbed);
    g.add();
  }
  if (mla.rope)
    rotate(s, scope + "q_pe", Builder::view(q, mla.nope, H * head - mla.nope), head,
           Builder::view(absorbed, R, H * row - R), row, H, mla.rope, mla.rope_pairs);
  if (selects && layer.own_indexer) {
    b.selecting.push_back({site.layer, slab, row, format});
    b.trace(fmt::format("layer.{}.query", site.layer), absorbed, H * row);
  }

  const int out_head = round_up(R, kStep);
  const Val attended = b.op_rows(scope + "attended", H * out_head);
  {
    auto a = b.graph.make<AttentionArgs>("attention", scope + "attention", b.kernels.attention);
    a->ld_q = absorbed.ld, a->q_head = row, a->heads = H, a->latent = R, a->rope = mla.rope;
    a->scale = mla.softmax_scale, a->page_bytes = b.caches.slab_bytes[slab], a->format = format;
    a->ld_out = attended.ld, a->out_head = out_head, a->expand_below = below;
    if (selects) a->width = s.list.width;
    const auto parts = [&](const char* what, int each) {
      return b.graph.value(scope + what, static_cast<size_t>(kAttentionParts) * H * each * 4);
    };
    const Slot part_out = parts("part values", round_up(R, kPanel)), part_top = parts("part tops", 1),
               part_sum = parts("part sums", 1);
    const auto point = [&](auto& node, AttentionArgs& args) {
      node.at(args.q, absorbed).at(args.slab, b.slab(slab)).at(args.out, attended);
      node.at(args.part_out, part_out).at(args.part_top, part_top).at(args.part_sum, part_sum);
      if (selects) node.at(args.list, s.list).at(args.count, s.count);
    };
    point(a, *a.operator->());
    auto m = b.graph.make<AttentionMergeArgs>("attention_merge", scope + "attention", b.kernels.attention_merge);
    m->attention = *a.operator->();
    point(m, m->attention);
    a.add();
    m.add();
  }

  const Val values = b.op_rows(scope + "values", H * mla.v);
  {
    const Matrix& m = b.weights.matrices[expand];
    auto g = b.graph.make<GemmArgs>("gemm", scope + "W_UV", b.kernels.gemm);
    g->ld_a = attended.ld, g->a_group = out_head, g->groups = H, g->w = m.w, g->ld_out = values.ld;
    g->epilogue = mla.output_gate ? Epilogue::gate_op : Epilogue::store_op;
    g->out_group = mla.v, g->out_pad = round_up(H * mla.v, kStep) - H * mla.v;
    g.at(g->a, attended).at(g->w.codes, m.codes).at(g->out, values);
    if (mla.output_gate) {
      g->ld_gate = down.ld;
      g.at(g->gate, part(gate));
    }
    g.add();
  }
  if (below) {  // overwrites the rows it takes
    const int keys = b.head_weights(kv_b, mla, HeadWeights::keys);
    const Matrix &key = b.weights.matrices[keys], &value = b.weights.matrices[expand];
    auto a = b.graph.make<ExpandedArgs>("attention_expanded", scope + "attention", b.kernels.attention_expanded);
    a->ld_q = q.ld, a->q_head = head, a->ld_pe = absorbed.ld, a->pe_head = row, a->key = key.w, a->value = value.w;
    a->heads = H, a->latent = R, a->nope = mla.nope, a->rope = mla.rope, a->v = mla.v, a->scale = mla.softmax_scale;
    a->page_bytes = b.caches.slab_bytes[slab], a->format = format, a->expand_below = below, a->ld_out = values.ld;
    a.at(a->q, q).at(a->q_pe, Builder::view(absorbed, R, H * row - R)).at(a->slab, b.slab(slab)).at(a->out, values);
    a.at(a->key.codes, key.codes).at(a->value.codes, value.codes);
    if (selects) {
      a->width = s.list.width;
      a.at(a->list, s.list).at(a->count, s.count);
    }
    if (mla.output_gate) {
      a->ld_gate = down.ld;
      a.at(a->gate, part(gate));
    }
    a.add();
  }
  const Sink sink = s.residual.sink(site);
  b.into(sink, scope + "o_proj", values, b.matrices(scope + "o_proj", {{scope + "o_proj", D}}, H * mla.v));
  s.residual.add(site, sink);
}

// down(act(gate x, up x)) into the sink
void mlp(Builder& b, const std::string& scope, const Normed& x, int intermediate, const Sink& sink) {
  const int D = b.config.hidden;
  const int pair = b.pair_matrix(scope + "gate_up", scope + "gate_proj", scope + "up_proj", intermediate, D);
  const Val h = b.op_rows(scope + "hidden", round_up(intermediate, 32));
  b.product(scope + "gate_up", x.op, false, pair, Epilogue::activate, h);
  b.into(sink, scope + "down_proj", h, b.matrices(scope + "down_proj", {{scope + "down_proj", D}}, intermediate));
}

void dense_layer(Stack& s, const Site& site) {
  // transformers writes Kimi-Linear's dense layer as block_sparse_moe; the release says mlp
  std::string scope = site.scope + "mlp.";
  if (!s.b.find(scope + "gate_proj.weight") && s.b.find(site.scope + s.names.moe + ".gate_proj.weight"))
    scope = site.scope + s.names.moe + ".";
  const Normed x = s.residual.mix(site, false);
  const Sink sink = s.residual.sink(site);
  mlp(s.b, scope, x, s.c.dense_intermediate, sink);
  s.residual.add(site, sink);
}

struct Routing {
  Val expert, weight, active, start, slot_token, slot_of, progress;
};

Routing route(Stack& s, const std::string& scope, const Normed& x) {
  Builder& b = s.b;
  const MoeSpec& moe = s.c.moe;
  const Parts gate = b.matrices(scope + "gate", {{scope + "gate", moe.experts}}, s.c.hidden);
  const Val logits = b.f32_rows(scope + "router logits", moe.experts);
  b.product(scope + "gate", x.f32, true, gate.matrices[0], Epilogue::store_f32, logits);
  Routing r;
  r.expert = b.raw_rows(scope + "experts", moe.top_k);
  r.weight = b.raw_rows(scope + "expert weights", moe.top_k);
  const TensorInfo& bias = b.tensor({scope + "gate.e_score_correction_bias"}, {moe.experts});
  auto n = b.graph.make<RouteArgs>("route", scope + "gate", b.kernels.route);
  n->ld = logits.ld, n->experts = moe.experts, n->top_k = moe.top_k, n->groups = moe.groups;
  n->top_groups = moe.top_groups, n->renormalize = moe.renormalize, n->scale = moe.scale, n->layer = b.moe_layers++;
  n.at(n->logits, logits).at(n->expert, r.expert).at(n->weight, r.weight);
  n.at(n->bias, b.vector(scope + "router bias", moe.experts, {&bias},
                         [&bias, count = moe.experts](float* o) { read_f32(bias, 0, count, o); }));
  n.add();
  const int rows = b.row_capacity(Rows::tokens) * moe.top_k;
  const auto ints = [&](const char* label, size_t count) {
    return Val{b.graph.value(scope + label, count * 4), 0, 0, 0, 4};
  };
  r.active = ints("active experts", static_cast<size_t>(moe.experts) + 1);
  r.start = ints("expert starts", static_cast<size_t>(moe.experts) + 1);
  r.slot_token = ints("slot tokens", rows);
  r.slot_of = ints("slots", rows);
  r.progress = ints("expert progress", 2 * static_cast<size_t>(moe.experts) + 1);
  auto e = b.graph.make<ExpertSortArgs>("expert_sort", scope + "experts", b.kernels.expert_sort);
  e->experts = moe.experts, e->top_k = moe.top_k;
  e.at(e->expert, r.expert).at(e->active, r.active).at(e->start, r.start).at(e->slot_token, r.slot_token);
  e.at(e->slot_of, r.slot_of).at(e->progress, r.progress);
  e.add();
  return r;
}

// Weighted sum of the chosen experts of `x` [width] into `out`.
void routed_experts(Stack& s, const std::string& scope, const Val& x, int width, const Routing& r, const Sink& out) {
  Builder& b = s.b;
  const MoeSpec& moe = s.c.moe;
  std::vector<std::pair<std::string, std::string>> pairs;
  std::vector<std::string> downs;
  for (int e = 0; e < moe.experts; ++e) {
    const std::string expert = fmt::format("{}experts.{}.", scope, e);
    pairs.emplace_back(expert + s.names.expert_gate, expert + s.names.expert_up);
    downs.push_back(expert + s.names.expert_down);
  }
  const int up = b.expert_pairs(scope + "experts gate_up", pairs, moe.intermediate, width);
  const int down = b.experts(scope + "experts down", downs, width, moe.intermediate);
  const Val h = b.expert_rows(scope + "expert hidden", round_up(moe.intermediate, 32), true);
  const Val y = b.expert_rows(scope + "expert out", width, false);
  {
    const Matrix &u = b.weights.matrices[up], &d = b.weights.matrices[down];
    auto n = b.graph.make<ExpertsArgs>("experts", scope + "experts", b.kernels.experts);
    n->ld_x = x.ld, n->up = u.w, n->up_codes = u.w.code_bytes(), n->up_scales = u.w.scale_bytes();
    n->down = d.w, n->down_codes = d.w.code_bytes(), n->down_scales = d.w.scale_bytes();
    n->experts = moe.experts, n->top_k = moe.top_k, n->intermediate = moe.intermediate, n->width = width;
    n->act = b.activation(), n->ld_h = h.ld, n->ld_y = y.ld;
    n.at(n->x, x).at(n->active, r.active).at(n->start, r.start).at(n->slot_token, r.slot_token);
    n.at(n->up.codes, u.codes).at(n->up.scales, u.scales).at(n->down.codes, d.codes).at(n->down.scales, d.scales);
    n.at(n->progress, r.progress).at(n->h, h).at(n->y, y);
    n.add();
  }
  auto n = b.graph.make<CombineArgs>("combine", scope + "combine", b.kernels.combine);
  n->ld_y = y.ld, n->top_k = moe.top_k, n->width = width, n->add = out.add, n->ld_out = out.out.ld;
  n.at(n->y, y).at(n->weight, r.weight).at(n->slot_of, r.slot_of).at(n->out, out.out);
  n.add();
}

void moe_layer(Stack& s, const Site& site) {
  Builder& b = s.b;
  const MoeSpec& moe = s.c.moe;
  const int D = s.c.hidden;
  const std::string scope = site.scope + s.names.moe + ".";
  const Normed x = s.residual.mix(site, true);
  const Routing r = route(s, scope, x);
  const Sink sink = s.residual.sink(site);
  Sink rest = sink;
  if (moe.shared_intermediate) {
    mlp(b, scope + "shared_experts.", x, moe.shared_intermediate, rest);
    rest.add = true;
  }
  if (!moe.latent) {
    routed_experts(s, scope, x.op, D, r, rest);
  } else {  // kimi.md 5.4: the norm is on the weighted sum
    const Parts down = b.matrices(scope + "routed_expert_down_proj", {{scope + "routed_expert_down_proj", moe.latent}}, D);
    const Val z = b.linear(x, down, scope + "routed_expert_down_proj", true);
    const Sink sum{b.f32_rows(scope + "expert sum", moe.latent), false};
    routed_experts(s, scope, z, moe.latent, r, sum);
    if (!moe.latent_norm) fail("{}: latent_moe_use_norm false is not supported: no released model has it", s.c.family);
    const Normed normed =
        b.norm(scope + "routed_expert_norm", sum.out, moe.latent, s.c.norm_eps, site.number() + 1, false);
    b.into(rest, scope + "routed_expert_up_proj", normed.op,
           b.matrices(scope + "routed_expert_up_proj", {{scope + "routed_expert_up_proj", D}}, moe.latent));
  }
  s.residual.add(site, sink);
}

void head(Builder& b, const Normed& x) {
  const ModelConfig& c = b.config;
  b.trace("hidden", x.f32, c.hidden, Rows::compact);
  const int matrix = b.head_matrix();
  b.logits = b.graph.external("logits");
  b.logits_ld = round_up(c.vocab, 32);
  Val out{b.logits, c.vocab, b.logits_ld, 0, 4};
  b.product("lm_head", x.op, false, matrix, Epilogue::store_f32, out, Rows::compact);
}

// What the kernels' fixed rooms hold; no released model comes near.
void check_limits(const ModelConfig& c) {
  const auto most = [&](const char* what, int found, int limit) {
    if (found > limit) fail("{}: {} is {}, weft's kernels take at most {}", c.family, what, found, limit);
  };
  most("KDA head_dim", c.kda.head_dim, kMaxHeadDim);
  most("KDA conv width", c.kda.conv_width, 16);
  most("index_head_dim", c.indexer.dim, kMaxHeadDim);
  most("index_n_heads", c.indexer.heads, 512);
  most("index_topk", c.indexer.topk, 1 << 16);
  most("kv_lora_rank + qk_rope_head_dim", c.mla.kv_lora + c.mla.rope, 2048);
  most("hidden size", c.hidden, 1 << 14);
  most("expert groups", c.moe.groups, kMaxExpertGroups);
  most("hc_mult", c.hc_streams, kMaxStreams);
  if (c.residual == Residual::attn_res)
    most("Attention Residual blocks", (c.num_layers() + c.attn_res_block - 1) / c.attn_res_block + 1, kMaxSources);
}

}  // namespace

void build_stack(Builder& b, const ModelConfig& c, const StackNames& names) {
  check_limits(c);
  const auto residual = make_residual(b);
  Stack s{b, c, names, *residual, RopeTables(b), {}, {}};
  residual->begin();
  for (int i = 0; i < c.num_layers(); ++i) {
    const LayerSpec& layer = c.layers[i];
    const std::string scope = fmt::format("layers.{}.", i);
    const Site attention{i, false, scope, "input_layernorm"}, ffn{i, true, scope, "post_attention_layernorm"};
    if (layer.mixer == Mixer::kda) kda_layer(s, attention);
    else mla_layer(s, attention, layer);
    if (layer.moe) moe_layer(s, ffn);
    else dense_layer(s, ffn);
    b.trace(fmt::format("layer.{}", i), residual->current(), residual->width());
  }
  head(b, residual->end());
}

}  // namespace weft
