// The narrow cache formats: what is written is bit for bit what base/quantize.h (itself held to recorded
// vectors) makes of the values; what is read is what a reader of the bytes would compute.
#include "base/quantize.h"
#include "kernels/cases.h"
#include "kernels/index_plan.h"
#include "reference.h"
#include "safetensors_lite.h"
#include "slabs.h"

namespace weft::test {
namespace {

using namespace reference;

weft::testing::LiteSafetensors numbers(const std::string& name) {
  return weft::testing::LiteSafetensors(std::string(WEFT_SOURCE_DIR) + "/tests/golden/numbers/" + name +
                                        ".safetensors");
}

// Panels of narrow index keys, poisoned with 0xFF: a NaN scale in both formats.
struct NarrowKeys {
  NarrowKeys(IndexFormat format, int pages, int dim, int pool)
      : format(format),
        dim(dim),
        pool(pool),
        per_page(kPageTokens / pool),
        panel_bytes(index_panel_bytes(format, dim, 0)),
        page_bytes(round_up(per_page, kPanel) / kPanel * panel_bytes),
        bytes(pages * page_bytes) {
    std::memset(bytes.data(), 0xFF, bytes.size());
  }
  uint8_t* panel(const TestStep& step, int span, int key) const {
    const int in_page = key % per_page;
    return bytes.data() + step.page(span, key / per_page) * page_bytes + in_page / kPanel * panel_bytes;
  }
  // As packed.h describes them: quads of k of 16 keys; E4M3 with the odd k of a quad in the odd lanes.
  uint8_t& code(uint8_t* panel, int lane, int k) const {
    return panel[k / 4 * 64 + 4 * lane + (format == IndexFormat::int8 ? k % 4 : k % 2 * 2 + k % 4 / 2)];
  }
  int padded() const { return round_up(dim, format == IndexFormat::int8 ? kQuadStep : kStep); }
  void put(const TestStep& step, int span, int key, const std::vector<float>& x) {
    uint8_t* to = panel(step, span, key);
    const int lane = key % per_page % kPanel;
    std::vector<uint8_t> codes(padded()), scales(padded() / 32);
    if (format == IndexFormat::mxfp8) {
      mxfp8_quantize(x.data(), dim, MxScale::rceil, codes.data(), scales.data());
      for (int g = 0; g < padded() / 32; ++g) to[padded() * kPanel + g * kPanel + lane] = scales[g];
    } else {
      const float scale = int8_quantize(x.data(), dim, reinterpret_cast<int8_t*>(codes.data()));
      std::memcpy(to + padded() * kPanel + 4 * lane, &scale, 4);
    }
    for (int k = 0; k < padded(); ++k)
      code(to, lane, k) = format == IndexFormat::mxfp8 && codes[k] == 0x80 ? 0 : codes[k];
  }
  double get(const TestStep& step, int span, int key, int k) const {
    uint8_t* from = panel(step, span, key);
    const int lane = key % per_page % kPanel;
    if (format == IndexFormat::mxfp8)
      return static_cast<double>(e4m3_to_float(code(from, lane, k))) *
             e8m0_to_float(from[padded() * kPanel + k / 32 * kPanel + lane]);
    float scale;
    std::memcpy(&scale, from + padded() * kPanel + 4 * lane, 4);
    return static_cast<double>(static_cast<int8_t>(code(from, lane, k))) * scale;
  }

  IndexFormat format;
  int dim, pool, per_page;
  size_t panel_bytes, page_bytes;
  Buffer bytes;
};

class Formats : public KernelTest {
 protected:
  // Writes one key per row of x [rows, dim] at positions 0, 1, ...: a norm of weight 0 leaves its bias, the
  // row.
  void write_keys(NarrowKeys& slab, int pages_for, const std::vector<float>& x, int dim) {
    const int rows = static_cast<int>(x.size()) / dim;
    const std::vector<float> zeros(dim);
    F32Rows input(table(), 1, dim);
    Random random(3);
    input.fill(0, 0, random.normals(dim).data(), dim);
    for (int r = 0; r < rows; ++r) {
      const TestStep step({{r, 1, 0}}, pages_for * kPageTokens, 1);
      IndexKeyArgs a{};
      a.key = input.data(), a.ld_key = dim, a.norm = zeros.data(),
      a.norm_bias = x.data() + static_cast<size_t>(r) * dim;
      a.eps = 1e-6f, a.dim = dim, a.pool = 1, a.slab = slab.bytes.as<std::byte>(),
      a.page_bytes = slab.page_bytes;
      a.format = slab.format;
      machine().run(table().index_key, a, step.header);
    }
  }
};

TEST_P(Formats, KeysAreTheRecordedMxfp8Codes) {
  const auto data = numbers("mx_rows");
  const auto all = data.get<float>("x");
  const auto codes = data.get<uint8_t>("mxfp8.rceil.codes"), scales = data.get<uint8_t>("mxfp8.rceil.scale");
  std::vector<float> x;
  std::vector<int> row;
  for (int r = 0; r < static_cast<int>(all.size()) / 32; ++r) {
    bool flushed = false;  // workers flush subnormal inputs
    for (int i = 0; i < 32; ++i)
      flushed = flushed || (all[32 * r + i] != 0 && std::abs(all[32 * r + i]) < 0x1p-126f);
    if (flushed || scales[r] < 10) continue;  // below 2^-117 a group is stored as zeros
    row.push_back(r);
    x.insert(x.end(), all.begin() + 32 * r, all.begin() + 32 * (r + 1));
  }
  ASSERT_GT(row.size(), 100u);
  NarrowKeys slab(IndexFormat::mxfp8, 4, 32, 1);
  write_keys(slab, 4, x, 32);
  const TestStep step({{0, 1, 0}}, 4 * kPageTokens, 1);
  for (int i = 0; i < static_cast<int>(row.size()); ++i) {
    uint8_t* panel = slab.panel(step, 0, i);
    ASSERT_EQ(panel[32 * kPanel + i % kPanel], scales[row[i]]) << "row " << row[i];
    for (int k = 0; k < 32; ++k) {
      const uint8_t zero_sign = codes[32 * row[i] + k] == 0x80 ? 0x80 : 0;  // stored as +0
      ASSERT_EQ(slab.code(panel, i % kPanel, k) | zero_sign, codes[32 * row[i] + k])
          << "row " << row[i] << " element " << k;
    }
  }
}

TEST_P(Formats, KeysAreTheQuantisersBytes) {
  Random random(11);
  for (const IndexFormat format : {IndexFormat::mxfp8, IndexFormat::int8})
    for (const int dim : {8, 40, 128}) {
      SCOPED_TRACE(::testing::Message() << "format " << static_cast<int>(format) << " dim " << dim);
      const int keys = 70;
      std::vector<float> x = random.normals(static_cast<size_t>(keys) * dim);
      for (int d = 0; d < dim; ++d) x[3 * dim + d] = 0, x[5 * dim + d] *= 1e-4f;
      x[7 * dim + 1] = 1000;
      NarrowKeys got(format, 2, dim, 1), want(format, 2, dim, 1);
      write_keys(got, 2, x, dim);
      const TestStep step({{0, 1, 0}}, 2 * kPageTokens, 1);
      for (int i = 0; i < keys; ++i) want.put(step, 0, i, {x.begin() + i * dim, x.begin() + (i + 1) * dim});
      EXPECT_EQ(0, std::memcmp(got.bytes.data(), want.bytes.data(), got.bytes.size()));
    }
}

// One step's queries as the format rounds them, with what a correct implementation may be off by.
std::vector<Bounded> rounded_query(const std::vector<double>& q, IndexFormat format) {
  const int dim = static_cast<int>(q.size());
  const std::vector<float> x(q.begin(), q.end());
  std::vector<Bounded> out;
  if (format == IndexFormat::mxfp8) {
    std::vector<uint8_t> codes(dim), scales((dim + 31) / 32);
    std::vector<float> y(dim);
    mxfp8_quantize(x.data(), dim, MxScale::rceil, codes.data(), scales.data());
    mxfp8_dequantize(codes.data(), scales.data(), dim, y.data());
    for (const float v : y) out.push_back({v, 0});
    return out;
  }
  std::vector<int8_t> codes(dim);
  const float scale = int8_quantize(x.data(), dim, codes.data());
  for (int d = 0; d < dim; ++d) {
    const double place =
        scale ? std::abs(q[d]) / scale : 0;  // in f32 a value beside a tie may go to either side
    out.push_back({static_cast<double>(codes[d]) * scale,
                   std::abs(place - std::floor(place) - 0.5) < 1e-4 ? scale : 0.0});
  }
  return out;
}

struct ScoreCase {
  int heads, dim, topk, pool, context, tokens;
};

class NarrowIndex : public Formats {};

// Selection over narrow keys: nobody chosen scores below somebody left out by more than rounding explains;
// unwritten keys are NaN, a written NaN key loses to all others; every cut and number of threads gives the
// same list.
TEST_P(NarrowIndex, SelectsByTheDequantisedScores) {
  uint64_t seed = 60;
  for (const IndexFormat format : {IndexFormat::mxfp8, IndexFormat::int8})
    for (const ScoreCase& c : {ScoreCase{2, 8, 3, 1, 12, 12},
                               {3, 40, 16, 1, 200, 37},
                               {32, 128, 64, 1, 300, 9},
                               {17, 96, 20, 1, 150, 3},
                               {32, 128, 64, 4, 700, 21},
                               {5, 24, 16, 8, 150, 40},
                               {64, 128, 16, 1, 130, 2},
                               // one row: its keys are made while it multiplies, in several calls
                               {32, 128, 64, 1, 1390, 1},
                               {64, 128, 16, 1, 597, 1},
                               {5, 96, 20, 2, 900, 1}}) {
      SCOPED_TRACE(::testing::Message() << "format " << static_cast<int>(format) << " heads " << c.heads
                                        << " dim " << c.dim << " pool " << c.pool);
      Random random(++seed);
      const TestStep step({{0, 3, 1}, {c.context - c.tokens, c.tokens, 0}}, c.context + 64, 2, seed);
      NarrowKeys slab(format, step.pages(), c.dim, c.pool);
      const int lost = c.context / c.pool / 2;
      for (int span = 0; span < 2; ++span)
        for (int i = 0; i < (step.header.span[span].position + step.header.span[span].length) / c.pool; ++i) {
          std::vector<float> x = random.normals(c.dim, 1 + random.uniform(0, 3));
          slab.put(step, span, i, x);
          if (span == 1 && i == lost) {  // a key that was NaN
            uint8_t* panel = slab.panel(step, 1, i);
            const int lane = i % slab.per_page % kPanel;
            if (format == IndexFormat::mxfp8)
              panel[slab.padded() * kPanel + lane] = 255;
            else
              std::memset(panel + slab.padded() * kPanel + 4 * lane, 0xFF, 4);
          }
        }
      const int tokens = step.header.tokens, width = c.topk + c.pool - 1;
      OpRows q(table(), tokens, c.heads * c.dim + 5);
      F32Rows weight(table(), tokens, c.heads + 3);
      for (int t = 0; t < tokens; ++t) {
        q.fill(t, 0, random.normals(c.heads * c.dim).data(), c.heads * c.dim);
        weight.fill(t, 0, random.normals(c.heads).data(), c.heads);
      }
      const auto run = [&](int tasks, int threads) {
        std::vector<int32_t> out(static_cast<size_t>(tokens) * width), count(tokens),
            index(static_cast<size_t>(kIndexLists) * c.topk), parts(kIndexLists);
        std::vector<float> score(index.size());
        IndexArgs a{};
        a.q = q.data(), a.ld_q = q.ld(), a.weight = weight.data(), a.ld_weight = weight.ld(), a.scale = 0.1f,
        a.heads = c.heads;
        a.dim = c.dim, a.topk = c.topk, a.pool = c.pool, a.slab = slab.bytes.as<std::byte>(),
        a.page_bytes = slab.page_bytes;
        a.out = out.data(), a.count = count.data(), a.width = width, a.format = format;
        a.part_score = score.data(), a.part_index = index.data(), a.part_count = parts.data();
        machine().run(table().index, a, step.header, tasks, threads);
        machine().run(table().index_merge, IndexMergeArgs{a}, step.header, tasks, threads);
        return out;
      };
      const std::vector<int32_t> out = run(0, 2);
      EXPECT_EQ(out, run(1, 1));
      for (int t = 0; t < tokens; ++t) {
        const int span = step.header.span_of[t], visible = step.header.position[t] + 1,
                  keys = visible / c.pool;
        std::vector<std::vector<Bounded>> heads;
        for (int h = 0; h < c.heads; ++h) heads.push_back(rounded_query(q.read(t, h * c.dim, c.dim), format));
        std::vector<bool> chosen(keys);
        int selected = 0;
        for (int i = 0; i < width; ++i) {
          const int token = out[static_cast<size_t>(t) * width + i];
          if (token >= 0 && token / c.pool < keys && !chosen[token / c.pool])
            chosen[token / c.pool] = true, ++selected;
        }
        ASSERT_EQ(selected, std::min(c.topk / c.pool, keys)) << "token " << t;
        double lowest = INFINITY, highest = -INFINITY;
        for (int i = 0; i < keys; ++i) {
          if (span == 1 && i == lost) {
            ASSERT_TRUE(!chosen[i] || keys <= c.topk / c.pool) << "the NaN key, token " << t;
            continue;
          }
          double sum = 0, error = 0;
          for (int h = 0; h < c.heads; ++h) {
            double dot = 0, size = 0, slack = 0;
            for (int d = 0; d < c.dim; ++d) {
              const double k = slab.get(step, span, i, d), x = heads[h][d].value;
              dot += x * k, size += std::abs(x * k), slack += heads[h][d].error * std::abs(k);
            }
            const double w = std::abs(weight.get(t, h)) * 0.1;
            sum += weight.get(t, h) * 0.1 * std::max(dot, 0.0);
            error += w * ((c.dim + 2) * kU * size + slack) + (c.heads + 8) * kU * w * std::abs(dot);
          }
          if (chosen[i])
            lowest = std::min(lowest, sum + error);
          else
            highest = std::max(highest, sum - error);
        }
        ASSERT_GE(lowest, highest) << "token " << t;
      }
    }
}

// Latent rows of both formats from the same input.
struct LatentPair {
  LatentPair(const KernelTable& table, Machine& machine, int latent, int rope, int tokens)
      : step({{0, tokens, 0}}, tokens, 1),
        wide(table, step.pages(), latent + rope),
        row_bytes(latent_row_bytes(LatentFormat::fp8, latent, rope, table.operand_bytes())),
        narrow(step.pages() * kPageTokens * row_bytes) {
    Random random(latent + rope);
    F32Rows kv(table, tokens, latent + rope);
    for (int t = 0; t < tokens; ++t) {
      std::vector<float> x = random.normals(latent + rope, 3);
      if (t % 7 == 2) x[5] *= 300;  // an outlier, for its tile only
      kv.fill(t, 0, x.data(), latent + rope);
    }
    const std::vector<float> norm = random.normals(latent);
    const RopeSetup angles(table, machine, step.header, std::max(rope, 2));
    LatentArgs a{};
    a.kv = kv.data(), a.ld_kv = kv.ld(), a.norm = norm.data(), a.eps = 1e-5f, a.latent = latent,
    a.rope = rope;
    a.mode = RopeMode::interleaved, a.table = angles.values.data();
    a.slab = wide.data(), a.page_bytes = wide.page_bytes;
    machine.run(table.latent, a, step.header);
    std::memset(narrow.data(), 0xFF, narrow.size());
    a.slab = narrow.as<std::byte>(), a.page_bytes = kPageTokens * row_bytes, a.format = LatentFormat::fp8;
    machine.run(table.latent, a, step.header);
  }
  TestStep step;
  LatentSlab wide;
  size_t row_bytes;
  Buffer narrow;
};

class NarrowLatent : public KernelTest {};

TEST_P(NarrowLatent, RowsAreTheQuantisersBytes) {
  EXPECT_EQ(latent_row_bytes(LatentFormat::fp8, 512, 64, 2), static_cast<size_t>(kLatentRow656));
  EXPECT_EQ(latent_row_bytes(LatentFormat::fp8, 512, 0, 2), static_cast<size_t>(kLatentRow528));
  for (const int rope : {64, 0}) {
    const LatentPair p(table(), machine(), 512, rope, 70);
    for (int t = 0; t < 70; ++t) {
      const int row = LatentSlab::row(p.step, 0, t);
      uint8_t want[kLatentRow656];
      std::vector<uint16_t> latent, pe;
      if (narrow()) {
        for (const double x : p.wide.rows.read(row, 0, 512))
          latent.push_back(float_to_bf16(static_cast<float>(x)));
        for (const double x : p.wide.rows.read(row, 512, rope))
          pe.push_back(float_to_bf16(static_cast<float>(x)));
        if (rope)
          latent656_quantize(latent.data(), pe.data(), TileScale::pow2_amax_floor, want);
        else
          latent528_quantize(latent.data(), TileScale::pow2_amax_floor, want);
      } else {
        std::vector<float> x;
        for (const double v : p.wide.rows.read(row, 0, 512)) x.push_back(static_cast<float>(v));
        float scales[4];
        fp8_tile_quantize(x.data(), 512, TileScale::pow2_amax_floor, want, scales);
        std::memcpy(want + 512, scales, 16);
        for (int i = 0; i < rope; ++i) {
          const uint16_t b = float_to_bf16(p.wide.rows.get(row, 512 + i));
          std::memcpy(want + 528 + 2 * i, &b, 2);
        }
      }
      ASSERT_EQ(0, std::memcmp(p.narrow.data() + row * p.row_bytes, want, p.row_bytes))
          << "token " << t << " rope " << rope;
    }
  }
}

// Golden latents through the format keep their direction.
TEST(NarrowLatents, CosineOfGoldenRows) {
  const auto latent = numbers("latent_rows").get<uint16_t>("latent");
  for (size_t r = 0; r < latent.size() / 512; ++r) {
    uint8_t row[kLatentRow528];
    uint16_t back[512];
    latent528_quantize(&latent[r * 512], TileScale::pow2_amax_floor, row);
    latent528_dequantize(row, back);
    double xy = 0, xx = 0, yy = 0;
    for (int i = 0; i < 512; ++i) {
      const double x = bf16_to_float(latent[r * 512 + i]), y = bf16_to_float(back[i]);
      xy += x * y, xx += x * x, yy += y * y;
    }
    if (!std::isfinite(xx) || yy == 0) continue;
    EXPECT_GE(xy / std::sqrt(xx * yy), 0.9995) << "row " << r;
  }
}

// Attention over narrow rows gives the bits of attention over the operands they expand to.
TEST_P(NarrowLatent, AttentionReadsTheExpandedRows) {
  for (const auto& [latent, rope, heads] : {std::tuple{512, 64, 20}, {512, 0, 3}, {20, 4, 5}, {150, 10, 2}}) {
    SCOPED_TRACE(::testing::Message() << "latent " << latent << " rope " << rope);
    const int tokens = 330, q_head = round_up(latent + rope, kStep);
    LatentPair p(table(), machine(), latent, rope, tokens);
    const int stored = round_up(latent, kCodeLine);
    for (int t = 0; t < tokens; ++t) {  // the operand slab becomes what the narrow rows say
      const int row = LatentSlab::row(p.step, 0, t);
      const uint8_t* bytes = p.narrow.data() + row * p.row_bytes;
      for (int i = 0; i < latent; ++i) {
        float scale;
        std::memcpy(&scale, bytes + stored + i / 128 * 4, 4);
        p.wide.rows.set(row, i, e4m3_to_float(bytes[i]) * scale);
      }
      for (int i = 0; i < rope; ++i) {
        uint16_t b;
        std::memcpy(&b, bytes + stored + (latent + 127) / 128 * 4 + 2 * i, 2);
        p.wide.rows.set(row, latent + i, bf16_to_float(b));
      }
    }
    Random random(5);
    const int rows = 5, width = 200, out_head = round_up(latent, kStep);
    OpRows q(table(), rows, heads * q_head);
    for (int t = 0; t < rows; ++t)
      for (int h = 0; h < heads; ++h)
        q.fill(t, h * q_head, random.normals(latent + rope).data(), latent + rope, q_head);
    std::vector<int32_t> list(rows * width, -1), count(rows, width);
    for (int t = 0; t < rows; ++t) {
      const std::vector<int> order = random.shuffled(tokens - rows);
      std::copy(order.begin(), order.begin() + width, list.begin() + t * width);
      std::sort(list.begin() + t * width, list.begin() + (t + 1) * width);
    }
    const TestStep step({{tokens - rows, rows, 0}}, tokens, 1);
    const auto run = [&](LatentFormat format, bool sparse) {
      OpRows out(table(), rows, heads * out_head);
      AttentionArgs a{};
      a.q = q.data(), a.ld_q = q.ld(), a.q_head = q_head, a.heads = heads, a.latent = latent, a.rope = rope,
      a.scale = 0.05f;
      a.slab = format == LatentFormat::fp8 ? p.narrow.as<std::byte>() : p.wide.data(), a.format = format;
      a.page_bytes = format == LatentFormat::fp8 ? kPageTokens * p.row_bytes : p.wide.page_bytes;
      if (sparse) a.list = list.data(), a.count = count.data(), a.width = width;
      a.out = out.data(), a.ld_out = out.ld(), a.out_head = out_head;
      machine().run(table().attention, a, step.header);
      return out;
    };
    for (const bool sparse : {false, true})
      EXPECT_TRUE(run(LatentFormat::operand, sparse).same_bytes(run(LatentFormat::fp8, sparse)))
          << "sparse " << sparse;
    // and the expanded form
    const int nope = 12, v = 10, block = 64;
    const TestWeight key = random_weight(random, WeightFormat::bf16, heads, nope, latent);
    const TestWeight value = random_weight(random, WeightFormat::bf16, heads, v, latent);
    OpRows eq(table(), block, heads * (nope + rope)), pe(table(), block, heads * (rope + 1));
    for (int t = 0; t < block; ++t) {
      eq.fill(t, 0, random.normals(eq.ld()).data(), eq.ld());
      pe.fill(t, 0, random.normals(pe.ld()).data(), pe.ld());
    }
    const TestStep chunk({{128, block, 0}}, tokens, 1);
    const auto expanded = [&](LatentFormat format) {
      OpRows out(table(), block, heads * v);
      ExpandedArgs a{};
      a.q = eq.data(), a.ld_q = eq.ld(), a.q_head = nope + rope, a.q_pe = pe.data(), a.ld_pe = pe.ld(),
      a.pe_head = rope + 1;
      a.key = key.packed, a.value = value.packed, a.heads = heads, a.latent = latent, a.nope = nope,
      a.rope = rope, a.v = v;
      a.scale = 0.05f, a.slab = format == LatentFormat::fp8 ? p.narrow.as<std::byte>() : p.wide.data(),
      a.format = format;
      a.page_bytes = format == LatentFormat::fp8 ? kPageTokens * p.row_bytes : p.wide.page_bytes;
      a.expand_below = 1 << 20, a.out = out.data(), a.ld_out = out.ld();
      machine().run(table().attention_expanded, a, chunk.header);
      return out;
    };
    EXPECT_TRUE(expanded(LatentFormat::operand).same_bytes(expanded(LatentFormat::fp8)));
  }
}

WEFT_KERNEL_TESTS(Formats);
WEFT_KERNEL_TESTS(NarrowIndex);
WEFT_KERNEL_TESTS(NarrowLatent);

}  // namespace
}  // namespace weft::test
