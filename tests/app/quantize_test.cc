// Tiers: packed while loading, written by weft quantize, planned.
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "base/quantize.h"
#include "engine/direct.h"
#include "model/checkpoint.h"
#include "tools_support.h"

namespace weft {
namespace {

using namespace test;

std::string tier_file(const Scratch& scratch, const std::string& format) {
  const std::string path = scratch / (format + ".json");
  std::ofstream(path) << "{\"experts\": \"" << format << "\"}";
  return path;
}

// Logits of 40 tokens, all rows.
std::vector<float> logits(const std::string& folder, const std::string& tier,
                          const std::string& isa = "portable") {
  DirectOptions options;
  options.engine.model = folder, options.engine.isa = isa, options.engine.threads = 2,
  options.engine.chunk = 40;
  options.engine.tier = read_tier(tier), options.max_logits = 40;
  Direct direct(options);
  std::vector<int32_t> ids;
  for (int i = 0; i < 40; ++i) ids.push_back((i * 29 + 3) % direct.config().vocab);
  direct.forward(ids, WantLogits::all);
  std::vector<float> all;
  for (int i = 0; i < 40; ++i)
    all.insert(all.end(), direct.model().logits(i), direct.model().logits(i) + direct.config().vocab);
  return all;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Tier, QuantizedFilesAreWhatTheTierPacks) {
  struct Case {
    const char* family;
    SynthFormat format;
  };
  for (const Case& c : {Case{"kimi_k31", SynthFormat::bf16},
                        {"kimi_k31", SynthFormat::mxfp4},
                        {"deepseek_v32", SynthFormat::fp8},
                        {"glm5_next", SynthFormat::bf16}})
    for (const char* format : {"mxfp4", "fp8", "mxfp8", "int8"}) {
      Scratch scratch;
      SynthSpec spec = tiny_spec(c.family);
      spec.format = c.format, spec.shard_bytes = 300 << 10;
      spec.expert_width = 160;  // more than one block of 128 rows, and a part of one
      synthesize(spec, scratch / "m");
      const bool already = c.format != SynthFormat::bf16 &&
                           std::string(format) == (c.format == SynthFormat::mxfp4 ? "mxfp4" : "fp8");
      const std::string tier = tier_file(scratch, format);
      const Ran ran = weft_command({"quantize", scratch / "m", "-o", scratch / "q", "--tier", tier});
      if (already) {
        EXPECT_EQ(ran.code, 2);
        EXPECT_NE(ran.err.find("already"), ran.err.npos) << ran.err;
        continue;
      }
      ASSERT_EQ(ran.code, 0) << ran.err;
      const std::vector<float> plain = logits(scratch / "m", "bf16"), tiered = logits(scratch / "m", tier);
      // Every E2M1 value times a power of two is an E4M3 value times one.
      const bool exact = c.format == SynthFormat::mxfp4 && std::string(format) == "mxfp8";
      EXPECT_EQ(same_bits(plain, tiered), exact) << c.family << " " << format;
      EXPECT_TRUE(same_bits(tiered, logits(scratch / "q", "bf16"))) << c.family << " " << format;
      EXPECT_TRUE(same_bits(tiered, logits(scratch / "q", tier))) << c.family << " " << format;
      // What is no expert's is copied.
      const Checkpoint from(scratch / "m"), to(scratch / "q");
      for (const TensorInfo& t : from.tensors()) {
        if (t.name.find(".experts.") != t.name.npos) continue;
        const TensorInfo* copy = to.find(t.name);
        ASSERT_NE(copy, nullptr) << t.name;
        ASSERT_EQ(copy->bytes, t.bytes);
        EXPECT_EQ(std::memcmp(copy->data, t.data, t.bytes), 0) << t.name;
      }
      // Nothing of the old format is left.
      EXPECT_EQ(weft_command({"inspect", scratch / "q", "--json"}).json()["unused"],
                weft_command({"inspect", scratch / "m", "--json"}).json()["unused"]);
      // The plan of the tier is the plan of the new folder.
      const auto plan = [&](const std::string& folder, const std::string& t) {
        return weft_command({"plan", folder, "--tier", t, "--isa", "portable", "--json"}).json();
      };
      const Json before = plan(scratch / "m", "bf16"), after = plan(scratch / "m", tier);
      EXPECT_EQ(after["weights_bytes"], plan(scratch / "q", "bf16")["weights_bytes"]);
      EXPECT_EQ(after["expert_format"], format);
      EXPECT_EQ(before["weights_bytes"].get<size_t>() - before["expert_bytes"].get<size_t>(),
                after["weights_bytes"].get<size_t>() - after["expert_bytes"].get<size_t>());
      if (c.format == SynthFormat::bf16) {
        const double share = std::string(format) == "mxfp4"  ? 0.28
                             : std::string(format) == "int8" ? 0.56
                                                             : 0.53;
        EXPECT_LT(after["expert_bytes"].get<double>(), before["expert_bytes"].get<double>() * share);
      }
    }
}

// Codes and scales of one expert against formulas written out here.
TEST(Tier, CodesAreThoseOfTheFormats) {
  Scratch scratch;
  SynthSpec spec = tiny_spec("kimi_linear");
  spec.expert_width = 160;
  synthesize(spec, scratch / "m");
  const Checkpoint from(scratch / "m");
  std::string module;
  for (const TensorInfo& t : from.tensors())
    if (t.name.find(".experts.5.") != t.name.npos && t.shape[0] == 160)
      module = t.name.substr(0, t.name.rfind('.'));
  ASSERT_FALSE(module.empty());
  const TensorInfo& source = *from.find(module + ".weight");
  const int64_t rows = source.shape[0], columns = source.shape[1];
  std::vector<uint16_t> bits(rows * columns);
  read_elements(source, 0, bits.size(), bits.data());
  const auto value = [&](int64_t r, int64_t c) { return bf16_to_float(bits[r * columns + c]); };

  ASSERT_EQ(
      weft_command({"quantize", scratch / "m", "-o", scratch / "fp8", "--tier", tier_file(scratch, "fp8")})
          .code,
      0);
  {
    const Checkpoint to(scratch / "fp8");
    const TensorInfo &w = *to.find(module + ".weight"), &s = *to.find(module + ".weight_scale_inv");
    EXPECT_EQ(s.shape, (std::vector<int64_t>{2, 1}));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = r / 128 * 128;
      double amax = 0;
      for (int64_t i = first; i < std::min<int64_t>(first + 128, rows); ++i)
        for (int64_t c = 0; c < columns; ++c) amax = std::max<double>(amax, std::fabs(value(i, c)));
      float scale = 0;
      read_elements(s, r / 128, 1, &scale);
      EXPECT_FLOAT_EQ(scale, static_cast<float>(std::max(amax, 1e-4) / 448));
      std::vector<uint8_t> codes(columns);
      read_elements(w, r * columns, columns, codes.data());
      for (int64_t c = 0; c < columns; ++c) {
        // Nearest: within half a step of E4M3 (2^-3 of the value, at least 2^-9), a little more for the
        // quotient.
        const double x = value(r, c) / scale, y = e4m3_to_float(codes[c]);
        ASSERT_LE(std::fabs(x - y), std::max(std::fabs(x) / 16, 0x1p-10) * 1.0001) << r << " " << c;
      }
    }
  }
  ASSERT_EQ(
      weft_command({"quantize", scratch / "m", "-o", scratch / "fp4", "--tier", tier_file(scratch, "mxfp4")})
          .code,
      0);
  const Checkpoint to(scratch / "fp4");
  EXPECT_EQ(to.find(module + ".weight"), nullptr);
  const TensorInfo &w = *to.find(module + ".weight_packed"), &s = *to.find(module + ".weight_scale");
  EXPECT_EQ(w.shape, (std::vector<int64_t>{rows, columns / 2}));
  const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      uint8_t code = 0, scale = 0;
      read_elements(w, r * columns / 2 + c / 2, 1, &code);
      read_elements(s, r * (columns / 32) + c / 32, 1, &scale);
      code = c % 2 ? code >> 4 : code & 15;
      double amax = 0;
      for (int64_t i = c / 32 * 32; i < c / 32 * 32 + 32; ++i)
        amax = std::max<double>(amax, std::fabs(value(r, i)));
      const double unit = std::ldexp(1.0, scale - 127);
      ASSERT_LE(amax, 6 * unit);      // nothing saturates
      ASSERT_GT(amax, 6 * unit / 2);  // and no exponent is wasted
      const double x = value(r, c) / unit, y = (code & 8 ? -1 : 1) * e2m1[code & 7];
      ASSERT_LE(std::fabs(x - y), std::fabs(x) < 2 ? 0.25 : std::fabs(x) < 4 ? 0.5 : 1.0) << r << " " << c;
    }
}

TEST(Tier, TheTableOfAccuracyIsAgainstTheRecordedResults) {
  const Ran ran = weft_command({"eval", "tiers", golden_folder("kimi_k31-tiny"),
                                golden_folder("kimi_k3-tiny"), "--isa", "portable", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json j = ran.json();
  ASSERT_EQ(j.size(), 10u);
  for (int i = 0; i < 10; i += 5) {
    const Json &plain = j[i], &fp8 = j[i + 2], &fp4 = j[i + 4];
    EXPECT_EQ(j[i + 1]["tier"], "int8-experts");
    EXPECT_EQ(j[i + 3]["tier"], "mxfp8-experts");
    EXPECT_LT(j[i + 1]["mean_kl"].get<double>(),
              fp8["mean_kl"].get<double>());  // 8 bits of magnitude against 4
    EXPECT_EQ(plain["tier"], "bf16");
    EXPECT_EQ(fp8["tier"], "fp8-experts");
    EXPECT_EQ(fp4["tier"], "fp4-experts");
    EXPECT_LT(plain["max_logit_error"].get<double>(), 3e-4);  // verify's bound
    EXPECT_LT(plain["mean_kl"].get<double>(), 1e-8);
    EXPECT_GT(fp8["mean_kl"].get<double>(), 100 * plain["mean_kl"].get<double>());
    EXPECT_GT(fp4["mean_kl"].get<double>(), fp8["mean_kl"].get<double>());
    EXPECT_GT(fp4["max_logit_error"].get<double>(), 1e-2);
    EXPECT_LT(fp4["weights_bytes"].get<size_t>(), fp8["weights_bytes"].get<size_t>());
    EXPECT_LT(fp8["weights_bytes"].get<size_t>(), plain["weights_bytes"].get<size_t>());
    EXPECT_EQ(plain["same_top"], 1);
    EXPECT_GT(plain["rows"].get<int>(), 100);
  }
  EXPECT_EQ(j[0]["mean_overlap"], 1);
  EXPECT_LT(j[4]["mean_overlap"].get<double>(), 1);
  EXPECT_GT(j[4]["mean_overlap"].get<double>(), 0.5);
  EXPECT_TRUE(j[5]["mean_overlap"].is_null());  // no indexer
  const std::string table =
      weft_command({"eval", "tiers", golden_folder("kimi_k3-tiny"), "--tiers", "fp4-experts"}).out;
  for (const char* part : {"mean KL", "kimi_k3-tiny", "fp4-experts"})
    EXPECT_NE(table.find(part), table.npos) << table;
  EXPECT_EQ(weft_command({"eval", "tiers", golden_folder("kimi_k3-tiny"), "--tiers", "none"}).code, 2);
  // Experts 56 wide cannot be cut in groups of 32; the other tiers' rows are there all the same.
  const Ran odd =
      weft_command({"eval", "tiers", golden_folder("kimi_linear-tiny"), "--isa", "portable", "--json"});
  EXPECT_EQ(odd.code, 1);
  EXPECT_NE(odd.err.find("groups of 32"), odd.err.npos) << odd.err;
  ASSERT_EQ(odd.json().size(), 5u);
  EXPECT_TRUE(odd.json()[4].contains("error"));
  EXPECT_LT(odd.json()[0]["mean_kl"].get<double>(), 1e-8);
}

TEST(Tier, SaysWhatIsWrong) {
  Scratch scratch;
  synthesize(tiny_spec("kimi_linear"), scratch / "m");
  const auto error = [&](std::vector<std::string> words, int code, const std::string& part) {
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, code) << part;
    EXPECT_NE(ran.err.find(part), ran.err.npos) << ran.err;
  };
  const auto with = [&](const std::string& json) {
    std::ofstream(scratch / "tier.json") << json;
    return scratch / "tier.json";
  };
  const std::string m = scratch / "m", q = scratch / "q";
  error({"plan", m, "--tier", "none"}, 2, "--tier none");
  error({"plan", m, "--tier", with("{\"heads\": \"fp8\"}")}, 1, "unknown part heads");
  error({"plan", m, "--tier", with("{\"experts\": \"int3\"}")}, 1, "experts is int3");
  error({"plan", m, "--tier", with("[]")}, 1, "tier.json");
  error({"quantize", m, "-o", q, "--tier", "bf16"}, 2, "changes no weights");
  error({"quantize", m, "-o", m, "--tier", with("{\"experts\": \"fp8\"}")}, 2, "already holds");
  error({"quantize", m, "-o", q}, 2, "tier");
  SynthSpec odd = tiny_spec("kimi_linear");
  odd.expert_width = 48;
  synthesize(odd, scratch / "odd");
  error({"quantize", scratch / "odd", "-o", q, "--tier", with("{\"experts\": \"mxfp4\"}")}, 1,
        "groups of 32");
  EXPECT_FALSE(fs::exists(q + "/config.json"));
}

}  // namespace
}  // namespace weft
