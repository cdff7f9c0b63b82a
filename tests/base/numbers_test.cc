// Codecs and quantisers against golden/numbers, bit for bit. Only NaN results are compared as "is NaN".
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <cmath>
#include <limits>

#include "base/dtype.h"
#include "base/quantize.h"
#include "safetensors_lite.h"

namespace weft {
namespace {

using testing::LiteSafetensors;

LiteSafetensors golden(const char* name) {
  return LiteSafetensors(std::string(WEFT_SOURCE_DIR "/tests/golden/numbers/") + name + ".safetensors");
}

// Same bits, or both NaN.
bool same(float got, float want) {
  return std::isnan(want) ? std::isnan(got) : float_bits(got) == float_bits(want);
}

void expect_same(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(same(got[i], want[i])) << what << " [" << i << "] got " << got[i] << " want " << want[i];
  }
}

bool bf16_nan(uint16_t code) {
  return (code & 0x7FFF) > 0x7F80;
}

void expect_same_bf16(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want,
                      const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(got[i] == want[i] || (bf16_nan(got[i]) && bf16_nan(want[i]))) << what << " [" << i << "]";
  }
}

template <class Decode>
void check_decode(const char* file, size_t count, Decode decode) {
  auto want = golden(file).get<float>("decode");
  ASSERT_EQ(want.size(), count);
  for (size_t i = 0; i < count; ++i) {
    float got = decode(static_cast<uint8_t>(i));
    EXPECT_TRUE(same(got, want[i])) << file << " code " << i << ": " << got << " want " << want[i];
  }
}

template <class Encode>
void check_encode(const char* file, const char* codes, Encode encode) {
  auto data = golden(file);
  auto x = data.get<float>("x");
  auto want = data.get<uint8_t>(codes);
  ASSERT_GT(x.size(), 500u);
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(int(encode(x[i])), int(want[i]))
        << codes << " of " << x[i] << " bits " << std::hex << float_bits(x[i]);
  }
}

TEST(Numbers, E4m3) {
  check_decode("e4m3fn", 256, e4m3_to_float);
  check_encode("e4m3fn", "codes_sat", float_to_e4m3);
  check_encode("e4m3fn", "codes_nan_on_overflow", float_to_e4m3_nan);
  for (int code = 0; code < 256; ++code) EXPECT_EQ(float_to_e4m3(e4m3_to_float(code)), code);
}

TEST(Numbers, E8m0) {
  check_decode("e8m0", 256, e8m0_to_float);
  check_encode("e8m0", "floor", e8m0_floor);
  check_encode("e8m0", "ceil", e8m0_ceil);
}

TEST(Numbers, E2m1) {
  check_decode("e2m1", 16, e2m1_to_float);
  check_encode("e2m1", "codes", float_to_e2m1);
  EXPECT_EQ(float_to_e2m1(std::numeric_limits<float>::quiet_NaN()), 0);
}

TEST(Numbers, Bf16) {
  auto data = golden("bf16");
  auto x = data.get<float>("x");
  auto rne = data.get<uint16_t>("bf16"), daz = data.get<uint16_t>("bf16_daz");
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(float_to_bf16(x[i]), rne[i]) << std::hex << float_bits(x[i]);
    EXPECT_EQ(float_to_bf16_daz(x[i]), daz[i]) << std::hex << float_bits(x[i]);
  }
  for (uint32_t code = 0; code < 65536; ++code) {
    uint16_t quiet = bf16_nan(code) ? code | 0x40 : code;
    ASSERT_EQ(float_to_bf16(bf16_to_float(code)), quiet);
  }
}

// No golden file: every half, and every boundary between two halves, against double arithmetic.
TEST(Numbers, Half) {
  auto value = [](uint32_t m) {
    return m < 0x400 ? std::ldexp(double(m), -24) : std::ldexp(double(1024 + (m & 0x3FF)), int(m >> 10) - 25);
  };
  for (uint32_t m = 0; m < 0x7C00; ++m) {
    float x = half_to_float(m);
    ASSERT_EQ(double(x), value(m));
    ASSERT_EQ(double(half_to_float(m | 0x8000)), -value(m));
    ASSERT_EQ(float_to_half(x), m);
    ASSERT_EQ(float_to_half(-x), m | 0x8000);
    float tie = float((value(m) + value(m + 1)) / 2);  // exact in fp32; value(0x7C00) is 65536
    ASSERT_EQ(float_to_half(tie), m + (m & 1));
    ASSERT_EQ(float_to_half(std::nextafter(tie, 0.0f)), m);
    ASSERT_EQ(float_to_half(std::nextafter(tie, 1e9f)), m + 1);
  }
  float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float_to_half(inf), 0x7C00);
  EXPECT_EQ(float_to_half(-3e38f), 0xFC00);
  EXPECT_EQ(half_to_float(0xFC00), -inf);
  for (uint32_t m = 0x7C01; m < 0x8000; ++m) {
    ASSERT_TRUE(std::isnan(half_to_float(m)));
    ASSERT_EQ(float_to_half(half_to_float(m)), m | 0x200);
  }
  EXPECT_EQ(float_to_half(bits_float(0xFFC02001)), 0xFE01);
}

// The codecs must give the same answers in worker threads, which run with FTZ and DAZ set.
class FlushToZero {
 public:
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

constexpr std::pair<const char*, MxScale> kMxRules[] = {
    {"floor", MxScale::floor}, {"rceil", MxScale::rceil}, {"even", MxScale::even}};

void check_mx_quantize() {
  auto data = golden("mx_rows");
  auto x = data.get<float>("x");
  for (auto [rule_name, rule] : kMxRules) {
    for (bool fp4 : {false, true}) {
      std::string name = std::string(fp4 ? "mxfp4." : "mxfp8.") + rule_name;
      std::vector<uint8_t> codes(fp4 ? x.size() / 2 : x.size(), 0xA5), scales(x.size() / 32);
      (fp4 ? mxfp4_quantize : mxfp8_quantize)(x.data(), x.size(), rule, codes.data(), scales.data());
      EXPECT_EQ(scales, data.get<uint8_t>(name + ".scale")) << name;
      EXPECT_EQ(codes, data.get<uint8_t>(name + ".codes")) << name;
    }
  }
}

TEST(Numbers, MxRows) {
  check_mx_quantize();
  auto data = golden("mx_rows");
  for (auto [rule_name, rule] : kMxRules) {
    for (bool fp4 : {false, true}) {
      std::string name = std::string(fp4 ? "mxfp4." : "mxfp8.") + rule_name;
      auto codes = data.get<uint8_t>(name + ".codes"), scales = data.get<uint8_t>(name + ".scale");
      std::vector<float> y(scales.size() * 32);
      (fp4 ? mxfp4_dequantize : mxfp8_dequantize)(codes.data(), scales.data(), y.size(), y.data());
      expect_same(y, data.get<float>(name + ".dequant"), name);
    }
  }
}

TEST(Numbers, MxRowsUnderFlushToZero) {
  FlushToZero flush;
  check_mx_quantize();
  float y;
  uint8_t code = 0x7E, scale = 0;  // 448 * 2^-127 is a normal number, though its scale is not
  mxfp8_dequantize(&code, &scale, 1, &y);
  EXPECT_EQ(float_bits(y), float_bits(0x1.cp-119f));
}

TEST(Numbers, MxShortLastGroup) {
  float x[38], y[38];
  for (int i = 0; i < 38; ++i) x[i] = i < 32 ? 1.0f : 0.001f;
  uint8_t codes[38], scales[2];
  mxfp8_quantize(x, 38, MxScale::rceil, codes, scales);
  mxfp8_dequantize(codes, scales, 38, y);
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_NEAR(y[37], 0.001f, 0.001f / 16);  // its own scale, half an ulp of three mantissa bits
  EXPECT_LT(scales[1], scales[0]);
}

TEST(Numbers, Mxfp4Weight) {
  auto data = golden("mxfp4_weight");
  auto packed = data.get<uint8_t>("weight_packed"), scales = data.get<uint8_t>("weight_scale");
  std::vector<float> y(6 * 96);
  mxfp4_weight_dequantize(packed.data(), scales.data(), 6, 96, y.data());
  expect_same(y, data.get<float>("dequant"), "mxfp4_weight");
}

TEST(Numbers, Fp8Blocks) {
  auto data = golden("fp8_block128");
  for (std::string shape : {"1x1", "128x128", "129x257", "200x300", "64x576"}) {
    auto dims = data.shape(shape + ".weight");
    auto w = data.get<uint8_t>(shape + ".weight");
    for (std::string kind : {".f32", ".pow2"}) {
      std::string name = shape + kind;
      std::vector<float> y(w.size());
      fp8_block_dequantize(w.data(), data.get<float>(name + ".weight_scale_inv").data(), dims[0], dims[1],
                           y.data());
      if (data.has(name + ".dequant")) expect_same(y, data.get<float>(name + ".dequant"), name);
      std::vector<uint16_t> rounded(y.size());
      for (size_t i = 0; i < y.size(); ++i) rounded[i] = float_to_bf16(y[i]);
      expect_same_bf16(rounded, data.get<uint16_t>(name + ".dequant_bf16"), name);
    }
  }
}

TEST(Numbers, LatentRows) {
  auto data = golden("latent_rows");
  auto latent = data.get<uint16_t>("latent"), rope = data.get<uint16_t>("rope");
  size_t rows = latent.size() / kLatentWidth;
  ASSERT_EQ(rows, 28u);
  auto each = [&](int width, auto write) {
    std::vector<uint8_t> all(rows * width, 0xA5);
    for (size_t r = 0; r < rows; ++r)
      write(r, &latent[r * kLatentWidth], &rope[r * kRopeWidth], &all[r * width]);
    return all;
  };
  std::vector<uint16_t> back(latent.size()), back_rope(rope.size());
  for (auto [name, rule] : {std::pair{"pow2_amax_floor", TileScale::pow2_amax_floor},
                            {"pow2_scale_floor", TileScale::pow2_scale_floor},
                            {"fp32", TileScale::fp32}}) {
    auto got = each(kLatentRow656,
                    [&](size_t, auto* l, auto* p, auto* row) { latent656_quantize(l, p, rule, row); });
    auto want = data.get<uint8_t>(std::string("row656.") + name);
    EXPECT_EQ(got, want) << name;
    for (size_t r = 0; r < rows; ++r) {
      latent656_dequantize(&want[r * kLatentRow656], &back[r * kLatentWidth], &back_rope[r * kRopeWidth]);
    }
    expect_same_bf16(back, data.get<uint16_t>(std::string("dequant.") + name), name);
    EXPECT_EQ(back_rope, rope);
  }

  auto tiles = each(kLatentRow528, [&](size_t, auto* l, auto*, auto* row) {
    latent528_quantize(l, TileScale::pow2_amax_floor, row);
  });
  EXPECT_EQ(tiles, data.get<uint8_t>("row528.tile128"));
  for (size_t r = 0; r < rows; ++r) latent528_dequantize(&tiles[r * kLatentRow528], &back[r * kLatentWidth]);
  expect_same_bf16(back, data.get<uint16_t>("dequant.pow2_amax_floor"), "tile128");

  auto mx = each(kLatentRow528, [&](size_t, auto* l, auto*, auto* row) { latent528_mx_quantize(l, row); });
  EXPECT_EQ(mx, data.get<uint8_t>("row528.mxfp8"));
  for (size_t r = 0; r < rows; ++r) latent528_mx_dequantize(&mx[r * kLatentRow528], &back[r * kLatentWidth]);
  expect_same_bf16(back, data.get<uint16_t>("dequant.mxfp8"), "mxfp8");
}

TEST(Numbers, TileScaleExamples) {  // worked by hand from the formula
  auto scale = [](float amax) { return fp8_tile_scale(amax, TileScale::pow2_amax_floor); };
  EXPECT_EQ(scale(1e-5f), 0x1p-22f);
  EXPECT_EQ(scale(1.0f), 0x1p-8f);
  EXPECT_EQ(scale(3.3f), 0x1p-7f);
  EXPECT_EQ(scale(448.0f), 1.0f);
  EXPECT_EQ(scale(1000.0f), 4.0f);
  EXPECT_EQ(fp8_tile_scale(0.0f, TileScale::pow2_scale_floor), 0x1p-13f);
}

TEST(Numbers, TileQuotientIsADivision) {
  // The fp32 quotient of the second element is exactly 5.25, a tie that goes to 5 (4A); times the rounded
  // reciprocal of the scale it would lie above and become 5.5 (4B).
  float x[2] = {0x1.14p+0f, 0x1.9ep-7f}, scale;
  uint8_t codes[2];
  fp8_tile_quantize(x, 2, TileScale::fp32, codes, &scale);
  EXPECT_EQ(scale, 0x1.3b6db6p-9f);
  EXPECT_EQ(codes[0], 0x7E);
  EXPECT_EQ(codes[1], 0x4A);
}

TEST(Numbers, Int8Rows) {
  auto data = golden("int8_rows");
  auto x = data.get<float>("x"), scale = data.get<float>("scale");
  auto want = data.get<int8_t>("q");
  auto near_tie = data.get<uint8_t>("near_tie");
  int64_t width = data.shape("x")[1];
  std::vector<int8_t> q(x.size());
  for (size_t r = 0; r < scale.size(); ++r) {
    EXPECT_TRUE(same(int8_quantize(&x[r * width], width, &q[r * width]), scale[r])) << "row " << r;
  }
  for (size_t i = 0; i < q.size(); ++i) {
    EXPECT_LE(std::abs(q[i] - want[i]), near_tie[i] ? 1 : 0)
        << "row " << i / width << " element " << i % width;
  }
}

TEST(Numbers, Hadamard) {
  auto data = golden("hadamard128");
  auto x = data.get<float>("x");
  auto want = data.get<double>("y");
  auto want_bf16 = data.get<uint16_t>("y_bf16");
  for (size_t row = 0; row < x.size(); row += 128) {
    double sum = 0;
    for (int i = 0; i < 128; ++i) sum += std::abs(double(x[row + i]));
    hadamard128(&x[row]);
    // Seven additions, the product and the rounded constant: nine roundings of at most u times the sum of
    // magnitudes.
    double bound = 9 * 0x1p-24 * sum * 0.08838834764831845 + 0x1p-149;
    for (int i = 0; i < 128; ++i) {
      ASSERT_LE(std::abs(x[row + i] - want[row + i]), bound) << "row " << row / 128 << " element " << i;
      // bf16 rounding is monotone; where both ends of the interval round alike the code must be the golden
      // one.
      float low = bf16_to_float(float_to_bf16(float(want[row + i] - bound)));
      float high = bf16_to_float(float_to_bf16(float(want[row + i] + bound)));
      float got = bf16_to_float(float_to_bf16(x[row + i]));
      ASSERT_TRUE(low <= got && got <= high) << "row " << row / 128 << " element " << i;
      if (low == high) {
        ASSERT_EQ(got, bf16_to_float(want_bf16[row + i]));
      }
    }
  }
}

static_assert(e4m3_to_float(0x7E) == 448.0f && float_to_e4m3(465.0f) == 0x7E &&
              float_to_e4m3_nan(465.0f) == 0x7F);
static_assert(dtype_size(DType::bf16) == 2 && dtype_size(DType::e8m0) == 1);

}  // namespace
}  // namespace weft
