// KDA against its token-by-token recurrence in double precision: outputs and states, any cut, any gate.
#include "kernel_support.h"
#include "kernels/cases.h"
#include "reference.h"

namespace weft::test {
namespace {

using cases::Gate;
using cases::KdaCase;
using namespace reference;

bool is_bounded(Gate gate) {
  return gate == Gate::bounded || gate == Gate::floor;
}

// A sequence from a non-zero state, in the layout of the kernel's arguments and as doubles.
struct Sequence {
  Sequence(const KdaCase& c, uint64_t seed) : c(c), random(seed) {
    const int H = c.heads, K = c.key_dim, V = c.value_dim;
    shape = {H, K, V, c.taps, is_bounded(c.gate), -5, 1e-5};
    channels = H * (2 * K + V);
    // q and k of one head share a direction with the previous token where keys shall be correlated
    const std::vector<float> direction = random.normals(channels);
    const auto a = static_cast<float>(std::sqrt(c.correlation)),
               b = static_cast<float>(std::sqrt(1 - c.correlation));
    for (int t = 0; t < c.tokens; ++t) {
      // beside zeros, vectors so small that the epsilon of the L2 norm shows
      const float size = !c.zero_every || t % c.zero_every > 1 ? 1 : t % c.zero_every == 1 ? 1e-3f : 0;
      for (int i = 0; i < channels; ++i) {
        const bool key = i >= H * K && i < 2 * H * K;
        const float x =
            key && c.correlation > 0 ? a * (2 + direction[i]) + b * random.normal() : random.normal();
        qkv.push_back(size * x);
      }
      for (int i = 0; i < H * K; ++i) decay.push_back(decay_input(t, i));
      for (int i = 0; i < H; ++i) beta.push_back(c.strong_beta ? 12 : random.normal() * 2);
      for (int i = 0; i < H * V; ++i) gate.push_back(random.normal());
    }
    conv = random.normals(static_cast<size_t>(c.taps) * channels, 0.5f);
    if (c.correlation > 0)
      for (float& w : conv) w = std::abs(w);
    for (int i = 0; i < H; ++i) slope.push_back(unit_slope() ? 1 : random.uniform(0.3f, 2));
    for (int i = 0; i < H * K; ++i) bias.push_back(unit_slope() ? 0 : random.normal() * 0.3f);
    for (int i = 0; i < V; ++i) norm.push_back(random.uniform(0.5f, 1.5f));
    state = random.normals(static_cast<size_t>(H) * K * V);
    tail = random.normals(static_cast<size_t>(c.taps - 1) * channels);
    for (std::vector<float>* x :
         {&qkv, &decay, &beta, &gate})  // the same on every ISA, whatever its operand type
      for (float& v : *x) v = bf16_to_float(float_to_bf16(v));
  }
  bool unit_slope() const { return c.gate != Gate::softplus && c.gate != Gate::bounded; }
  float decay_input(int t, int channel) {
    switch (c.gate) {
      case Gate::softplus:
      case Gate::bounded:
        return random.normal() * 2 - 1;
      case Gate::still:
        return -200;
      case Gate::floor:
        return 60;
      case Gate::reset:
        return t % 7 == 5 || (channel + t) % 11 == 0 ? 1000 : random.normal() - 2;
      case Gate::tiny:
        return 27;
      case Gate::huge:
        return t == 20 || t == 3 ? 3e38f : random.normal() - 2;
    }
    return 0;
  }
  KdaInput input() const {
    const auto d = [](const std::vector<float>& x) { return Vec(x.begin(), x.end()); };
    return {d(qkv), d(decay), d(beta), d(gate), d(conv), d(slope), d(bias), d(norm), d(state), d(tail)};
  }

  KdaCase c;
  Random random;
  KdaShape shape;
  int channels;
  std::vector<float> qkv, decay, beta, gate, conv, slope, bias, norm, state, tail;
};

// State slots of some sequences: [S | tail] each, poisoned where nothing belongs.
struct Slots {
  Slots(const Sequence& s, int slots)
      : v_stride(round_up(s.c.value_dim, kPanel)),
        conv_stride(round_up(s.channels, kPanel)),
        tail_offset(static_cast<size_t>(s.c.heads) * s.c.key_dim * v_stride * 4),
        stride((tail_offset + static_cast<size_t>(s.c.taps - 1) * conv_stride * 4 + 63) / 64 * 64),
        bytes(slots * stride) {
    std::memset(bytes.data(), 0xFF, bytes.size());
  }
  float* row(int slot, int head, int d, int K) const {
    return bytes.as<float>(slot * stride) + (static_cast<size_t>(head) * K + d) * v_stride;
  }
  float* tail(int slot, int r) const {
    return bytes.as<float>(slot * stride + tail_offset) + static_cast<size_t>(r) * conv_stride;
  }
  void load(int slot, const Sequence& s) {
    const int K = s.c.key_dim, V = s.c.value_dim;
    for (int h = 0; h < s.c.heads; ++h)
      for (int d = 0; d < K; ++d) {
        std::copy_n(&s.state[(static_cast<size_t>(h) * K + d) * V], V, row(slot, h, d, K));
        std::fill(row(slot, h, d, K) + V, row(slot, h, d, K) + v_stride, 0.f);
      }
    for (int r = 0; r < s.c.taps - 1; ++r)
      std::copy_n(&s.tail[static_cast<size_t>(r) * s.channels], s.channels, tail(slot, r));
  }
  void copy(int to, int from) {
    std::memcpy(bytes.data() + to * stride, bytes.data() + from * stride, stride);
  }
  bool same(int slot, const Slots& other, int other_slot) const {
    return std::memcmp(bytes.data() + slot * stride, other.bytes.data() + other_slot * stride, stride) == 0;
  }
  Vec read_state(int slot, const Sequence& s) const {
    Vec out;
    for (int h = 0; h < s.c.heads; ++h)
      for (int d = 0; d < s.c.key_dim; ++d)
        for (int v = 0; v < s.c.value_dim; ++v) out.push_back(row(slot, h, d, s.c.key_dim)[v]);
    return out;
  }

  int v_stride, conv_stride;
  size_t tail_offset, stride;
  Buffer bytes;
};

// A piece of a sequence in one step.
struct Piece {
  const Sequence* sequence;
  int first, length, slot;
};

double relative_rms(const Vec& actual, const Vec& expected) {
  double off = 0, size = 0;
  for (size_t i = 0; i < actual.size(); ++i)
    off += (actual[i] - expected[i]) * (actual[i] - expected[i]), size += expected[i] * expected[i];
  return std::sqrt(off / (size + kTiny));
}

class Kda : public KernelTest {
 protected:
  // Runs pieces as the spans of one step; their weights are those of the first. Rows of piece i land in
  // out[i] at its own token index.
  void step(const std::vector<Piece>& pieces, Slots& slots, const std::vector<OpRows*>& out, int tasks = 0,
            int threads = 2) {
    const Sequence& s = *pieces[0].sequence;
    const int H = s.c.heads, K = s.c.key_dim, V = s.c.value_dim;
    std::vector<TestSpan> spans;
    int rows = 0;
    for (const Piece& p : pieces) spans.push_back({p.first, p.length, p.slot}), rows += p.length;
    TestStep batch(spans, 64, 8);
    batch.header.state_stride = slots.stride;
    // v and k lie apart from q, as the parts of one projection do
    const int k_at = round_up(H * K, 16) + 16, v_at = k_at + round_up(H * K, 16);
    OpRows qkv(table(), rows, v_at + H * V + 7), decay(table(), rows, H * K + 3), beta(table(), rows, H + 1),
        gate(table(), rows, H * V + 2);
    int row = 0;
    for (const Piece& p : pieces)
      for (int t = p.first; t < p.first + p.length; ++t, ++row) {
        const Sequence& x = *p.sequence;
        const float* from = &x.qkv[static_cast<size_t>(t) * x.channels];
        qkv.fill(row, 0, from, H * K);
        qkv.fill(row, k_at, from + H * K, H * K);
        qkv.fill(row, v_at, from + 2 * H * K, H * V);
        decay.fill(row, 0, &x.decay[static_cast<size_t>(t) * H * K], H * K);
        beta.fill(row, 0, &x.beta[static_cast<size_t>(t) * H], H);
        gate.fill(row, 0, &x.gate[static_cast<size_t>(t) * H * V], H * V);
      }
    std::vector<float> conv(static_cast<size_t>(s.c.taps) * slots.conv_stride, NAN);
    for (int tap = 0; tap < s.c.taps; ++tap)
      std::copy_n(&s.conv[static_cast<size_t>(tap) * s.channels], s.channels,
                  &conv[static_cast<size_t>(tap) * slots.conv_stride]);
    OpRows result(table(), rows, round_up(H * V, kStep) + 32);
    KdaArgs a{};
    a.qkv = qkv.data(), a.ld_qkv = qkv.ld(), a.k_offset = k_at, a.v_offset = v_at, a.decay = decay.data();
    a.ld_decay = decay.ld(), a.beta = beta.data(), a.ld_beta = beta.ld(), a.gate = gate.data(),
    a.ld_gate = gate.ld();
    a.conv = conv.data(), a.conv_stride = slots.conv_stride, a.slope = s.slope.data(), a.bias = s.bias.data();
    a.norm = s.norm.data(), a.state = slots.bytes.as<std::byte>(), a.tail_offset = slots.tail_offset,
    a.heads = H;
    a.key_dim = K, a.value_dim = V, a.v_stride = slots.v_stride, a.taps = s.c.taps,
    a.bounded = s.shape.bounded;
    a.lower_bound = static_cast<float>(s.shape.lower_bound),
    a.norm_eps = static_cast<float>(s.shape.norm_eps);
    a.out = result.data(), a.ld_out = result.ld();
    machine().run(table().kda, a, batch.header, tasks, threads);
    row = 0;
    for (size_t i = 0; i < pieces.size(); ++i)
      for (int r = 0; r < pieces[i].length; ++r, ++row) {
        for (int c = 0; c < H * V; ++c) out[i]->set(pieces[i].first + r, c, result.get(row, c));
        for (int c = H * V; c < round_up(H * V, kStep); ++c)
          ASSERT_EQ(result.get(row, c), 0.f) << "padding of row " << row;
        ASSERT_TRUE(result.untouched(row, round_up(H * V, kStep)));
      }
    ASSERT_TRUE(result.untouched(rows, 0));
  }
  KdaShape shape(const Sequence& s) const {
    KdaShape shape = s.shape;
    shape.tiles = std::string(table().isa).starts_with("amx");
    return shape;
  }
  OpRows outputs(const Sequence& s) { return OpRows(table(), s.c.tokens, s.c.heads * s.c.value_dim); }

  // The whole sequence in pieces that end at `ends`, in slot 1 of 3; the neighbours stay as they were.
  OpRows run_cut(const Sequence& s, Slots& slots, const std::vector<int>& ends, int threads = 2) {
    Slots before(s, 3);
    slots.load(1, s);
    OpRows out = outputs(s);
    int first = 0;
    for (const int end : ends) {
      step({{&s, first, end - first, 1}}, slots, {&out}, threads == 1 ? 1 : 0, threads);
      first = end;
    }
    EXPECT_TRUE(slots.same(0, before, 0) && slots.same(2, before, 2))
        << "another sequence's state was written";
    return out;
  }

  void expect_equals(const KdaOutput& expected, const Sequence& s, const OpRows& out, const Slots& slots,
                     int slot) {
    Vec actual;
    BoundedVec y;
    const int width = s.c.heads * s.c.value_dim;
    for (int t = 0; t < s.c.tokens; ++t)
      for (int c = 0; c < width; ++c) {
        actual.push_back(out.get(t, c));
        y.push(stored(expected.y[static_cast<size_t>(t) * width + c], narrow()));
      }
    EXPECT_CLOSE(actual, y.value, y.error) << "outputs";
    EXPECT_CLOSE(slots.read_state(slot, s), expected.state.value, expected.state.error) << "state";
    if (shape(s).tiles) {
      // The bounds add worst cases over 64 tokens: a block of scores could be wrong and stay inside. What
      // bf16 operands leave on average is below 1 % (systems.md 4).
      EXPECT_LE(relative_rms(actual, y.value), 0.01) << "outputs";
      EXPECT_LE(relative_rms(slots.read_state(slot, s), expected.state.value), 0.01) << "state";
    }
    for (int r = 0; r < s.c.taps - 1; ++r)
      for (int c = 0; c < s.channels; ++c) {
        const int t = s.c.tokens - (s.c.taps - 1) + r;
        const float x = t >= 0 ? s.qkv[static_cast<size_t>(t) * s.channels + c]
                               : s.tail[static_cast<size_t>(s.c.taps - 1 + t) * s.channels + c];
        ASSERT_EQ(slots.tail(slot, r)[c], x) << "conv tail row " << r << " channel " << c;
      }
  }
};

TEST_P(Kda, MatchesTheRecurrence) {
  uint64_t seed = 10;
  for (const KdaCase& c : cases::kda_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Sequence s(c, ++seed);
    Slots slots(s, 3), again(s, 3);
    const OpRows out = run_cut(s, slots, {c.tokens});
    const OpRows alone = run_cut(s, again, {c.tokens}, 1);
    EXPECT_TRUE(out.same_bytes(alone) && slots.same(1, again, 1)) << "the number of threads changed a bit";
    expect_equals(reference::kda(shape(s), s.input(), {}), s, out, slots, 1);
  }
}

// Every way of cutting 47 tokens agrees with the recurrence; cuts at multiples of 16 change no bit.
TEST_P(Kda, AnyCut) {
  const std::vector<std::vector<int>> cuts = {{16, 32, 47},  {17, 47}, {46, 47}, {15, 16, 47},
                                              {1, 2, 3, 47}, {32, 47}, {16, 47}};
  for (const Gate gate : {Gate::softplus, Gate::bounded, Gate::reset}) {
    const Sequence s({2, 8, 12, gate, 47}, 31 + static_cast<int>(gate));
    SCOPED_TRACE(::testing::Message() << s.c);
    Slots whole_slots(s, 3);
    const OpRows whole = run_cut(s, whole_slots, {47});
    std::vector<std::vector<int>> all = cuts;
    all.emplace_back();
    for (int t = 1; t <= 47; ++t) all.back().push_back(t);  // 47 decode steps
    for (const std::vector<int>& ends : all) {
      SCOPED_TRACE(::testing::PrintToString(ends));
      Slots slots(s, 3);
      const OpRows out = run_cut(s, slots, ends);
      expect_equals(reference::kda(shape(s), s.input(), ends), s, out, slots, 1);
      const bool aligned =
          std::all_of(ends.begin(), ends.end() - 1, [](int end) { return end % kKdaChunk == 0; });
      EXPECT_TRUE(!aligned || (out.same_bytes(whole) && slots.same(1, whole_slots, 1)))
          << "a cut at a multiple of 16 changed a bit";
    }
  }
}

// The same across pages: cuts at multiples of 64 change no bit where chunks are 64 tokens, nor does a further
// cut at the end of the chunk a piece starts in.
TEST_P(Kda, AnyCutOfPages) {
  const std::vector<std::vector<int>> cuts = {
      {64, 200},     {128, 200}, {64, 128, 192, 200}, {192, 200}, {70, 200},
      {63, 64, 200}, {1, 200},   {33, 97, 200},       {95, 200},  {199, 200}};
  for (const Gate gate : {Gate::softplus, Gate::bounded, Gate::reset}) {
    const Sequence s({1, 32, 24, gate, 200}, 51 + static_cast<int>(gate));
    SCOPED_TRACE(::testing::Message() << s.c);
    Slots whole_slots(s, 3);
    const OpRows whole = run_cut(s, whole_slots, {200});
    for (const std::vector<int>& ends : cuts) {
      SCOPED_TRACE(::testing::PrintToString(ends));
      Slots slots(s, 3);
      const OpRows out = run_cut(s, slots, ends);
      expect_equals(reference::kda(shape(s), s.input(), ends), s, out, slots, 1);
      const bool aligned =
          std::all_of(ends.begin(), ends.end() - 1, [](int end) { return end % kPageTokens == 0; });
      EXPECT_TRUE(!aligned || (out.same_bytes(whole) && slots.same(1, whole_slots, 1)))
          << "a cut at a multiple of 64 changed a bit";
    }
    for (const int start : {5, 20, 40, 70}) {
      Slots once_slots(s, 3), again_slots(s, 3);
      const int end = (start / kPageTokens + 1) * kPageTokens;
      const OpRows once = run_cut(s, once_slots, {start, 200}),
                   again = run_cut(s, again_slots, {start, end, 200});
      EXPECT_TRUE(once.same_bytes(again) && once_slots.same(1, again_slots, 1)) << "piece from " << start;
    }
  }
}

// A piece that starts inside a chunk ends that chunk at the absolute multiple of 16, so a further cut there
// is no cut.
TEST_P(Kda, ChunksLieAtAbsolutePositions) {
  const Sequence s({2, 8, 12, Gate::softplus, 47}, 33);
  for (const int start : {1, 5, 17, 31}) {
    Slots once_slots(s, 3), again_slots(s, 3);
    std::vector<int> ends = {start};
    for (int t = (start / kKdaChunk + 1) * kKdaChunk; t < 47; t += kKdaChunk) ends.push_back(t);
    ends.push_back(47);
    const OpRows once = run_cut(s, once_slots, {start, 47}), again = run_cut(s, again_slots, ends);
    EXPECT_TRUE(once.same_bytes(again) && once_slots.same(1, again_slots, 1)) << "piece from " << start;
  }
}

// The tests above would see a state that is lost, or stale, between two pieces.
TEST_P(Kda, NegativeControl) {
  const Sequence s({2, 8, 12, Gate::softplus, 47}, 5);
  const KdaOutput expected = reference::kda(shape(s), s.input(), {16});
  for (const bool lost : {true, false}) {
    Slots slots(s, 3);
    OpRows out = outputs(s);
    slots.load(1, s);
    step({{&s, 0, 16, 1}}, slots, {&out});
    if (lost)
      std::fill(slots.row(1, 0, 0, 8), slots.row(1, 1, 7, 8) + 12, 0.f);
    else
      slots.load(1, s);
    step({{&s, 16, 31, 1}}, slots, {&out});
    EXPECT_FALSE(close(slots.read_state(1, s), expected.state.value, expected.state.error));
  }
}

// Two sequences beside each other, one decoding and one in prefill, equal each alone to the bit.
TEST_P(Kda, Neighbours) {
  const KdaCase c{3, 20, 12, Gate::softplus, 40};
  const Sequence a(c, 71);
  Sequence b(c, 72);
  b.conv = a.conv, b.slope = a.slope, b.bias = a.bias, b.norm = a.norm;
  Slots together(a, 4), alone(a, 4);
  OpRows out_a = outputs(a), out_b = outputs(b), one_a = outputs(a), one_b = outputs(b);
  together.load(3, a), together.load(0, b), alone.load(3, a), alone.load(0, b);
  step({{&a, 0, 39, 3}, {&b, 0, 5, 0}}, together, {&out_a, &out_b});
  step({{&b, 5, 35, 0}, {&a, 39, 1, 3}}, together, {&out_b, &out_a}, 5);
  step({{&a, 0, 39, 3}}, alone, {&one_a}, 1, 1);
  step({{&a, 39, 1, 3}}, alone, {&one_a}, 1, 1);
  step({{&b, 0, 5, 0}}, alone, {&one_b}, 1, 1);
  step({{&b, 5, 35, 0}}, alone, {&one_b}, 1, 1);
  EXPECT_TRUE(out_a.same_bytes(one_a));
  EXPECT_TRUE(out_b.same_bytes(one_b));
  for (int slot = 0; slot < 4; ++slot) EXPECT_TRUE(together.same(slot, alone, slot)) << "slot " << slot;
}

// Memory of the state's padding columns is another's past: whatever is there, nothing of it comes out.
TEST_P(Kda, DirtyPadding) {
  for (const auto& [K, tokens] : {std::pair{8, 21}, {8, 1}, {32, 90}}) {
    const Sequence s({2, K, 12, Gate::softplus, tokens}, 9);
    Slots clean(s, 3), dirty(s, 3);
    const OpRows expected = run_cut(s, clean, {tokens});
    dirty.load(1, s);
    for (int h = 0; h < 2; ++h)
      for (int d = 0; d < K; ++d)
        for (int v = 12; v < 16; ++v) dirty.row(1, h, d, K)[v] = NAN;
    OpRows out = outputs(s);
    step({{&s, 0, tokens, 1}}, dirty, {&out});
    EXPECT_TRUE(out.same_bytes(expected));
    EXPECT_EQ(dirty.read_state(1, s), clean.read_state(1, s));
  }
}

// Pieces shorter than the conv window, continued from a shared prefix by two sequences (each in a copy of its
// slot): both equal the uncut run, and the shared slot keeps its bytes.
TEST_P(Kda, ShortPiecesAfterAPrefix) {
  for (const int piece : {1, 2, 3, 4}) {
    SCOPED_TRACE(piece);
    const Sequence s({2, 8, 12, Gate::softplus, 10 + piece}, 90 + piece);
    Slots slots(s, 4), kept(s, 4);
    OpRows prefix = outputs(s), left = outputs(s), right = outputs(s);
    slots.load(0, s);
    step({{&s, 0, 10, 0}}, slots, {&prefix});
    kept.copy(0, 0);
    std::memcpy(kept.bytes.data(), slots.bytes.data(), slots.bytes.size());
    slots.copy(2, 0), slots.copy(3, 0);
    step({{&s, 10, piece, 2}, {&s, 10, piece, 3}}, slots, {&left, &right});
    EXPECT_TRUE(slots.same(0, kept, 0)) << "the shared prefix was written";
    EXPECT_TRUE(slots.same(2, slots, 3));
    for (int t = 0; t < 10; ++t)
      for (int c = 0; c < 24; ++c) left.set(t, c, prefix.get(t, c)), right.set(t, c, prefix.get(t, c));
    const KdaOutput expected = reference::kda(shape(s), s.input(), {10});
    expect_equals(expected, s, left, slots, 2);
    expect_equals(expected, s, right, slots, 3);
  }
}

// With q = k = 0 one token leaves the state times exp(g): the gate itself, against both closed forms.
TEST_P(Kda, GateForms) {
  const float inputs[] = {-20, -4, 0, 4, 20};
  for (const bool bounded : {false, true}) {
    Sequence s({1, 5, 3, bounded ? Gate::bounded : Gate::softplus, 1}, 4);
    std::fill(s.qkv.begin(), s.qkv.end(), 0.f);
    std::fill(s.tail.begin(), s.tail.end(), 0.f);
    std::fill(s.state.begin(), s.state.end(), 1.f);
    s.slope[0] = 1.7f;
    for (int d = 0; d < 5; ++d) s.bias[d] = 0.25f, s.decay[d] = inputs[d];
    Slots slots(s, 3);
    run_cut(s, slots, {1});
    for (int d = 0; d < 5; ++d) {
      const double x = static_cast<double>(inputs[d]) + 0.25, slope = s.slope[0];
      const double g = bounded ? -5 / (1 + std::exp(-slope * x)) : -slope * std::log1p(std::exp(x));
      const double other =
          std::max(-slope * std::log1p(std::exp(x)), -5.0);  // the clamped softplus some engines had
      const double error = std::exp(g) * (reference::kda_gate(s.shape, slope, x).error + kElementary) + kTiny;
      EXPECT_NEAR(slots.row(1, 0, d, 5)[1], std::exp(g), error) << "input " << inputs[d];
      EXPECT_TRUE(!bounded || inputs[d] != 0 || std::abs(g - other) > 0.1) << "blind to the wrong form";
    }
  }
}

// A token whose decay is -inf everywhere acts as a reset: what came before it does not matter.
TEST_P(Kda, InfiniteDecayIsAReset) {
  Sequence s({1, 4, 6, Gate::huge, 64}, 8);
  Slots slots(s, 3);
  const OpRows out = run_cut(s, slots, {64});
  Sequence other = s;
  for (float& x : other.state) x *= -3;
  Slots other_slots(s, 3);
  const OpRows other_out = run_cut(other, other_slots, {64});
  EXPECT_EQ(slots.read_state(1, s), other_slots.read_state(1, s));
  for (int t = 20; t < 64; ++t) EXPECT_TRUE(out.same_row(t, other_out, t, 0, 6)) << "token " << t;
  EXPECT_FALSE(out.same_row(0, other_out, 0, 0, 6));
}

// A later token moves nothing before it, inside a chunk too.
TEST_P(Kda, TheFutureDoesNotMatter) {
  const Sequence s({2, 8, 12, Gate::bounded, 29}, 14);
  Sequence changed = s;
  for (int i = 0; i < 16; ++i) changed.decay[static_cast<size_t>(21) * 16 + i] += 3;
  for (int i = 0; i < s.channels; ++i) changed.qkv[static_cast<size_t>(21) * s.channels + i] += 1;
  Slots slots(s, 3), changed_slots(s, 3);
  const OpRows out = run_cut(s, slots, {29}), changed_out = run_cut(changed, changed_slots, {29});
  for (int t = 0; t < 21; ++t) EXPECT_TRUE(out.same_row(t, changed_out, t, 0, 24)) << "token " << t;
  EXPECT_FALSE(out.same_row(21, changed_out, 21, 0, 24));
}

WEFT_KERNEL_TESTS(Kda);

}  // namespace
}  // namespace weft::test
