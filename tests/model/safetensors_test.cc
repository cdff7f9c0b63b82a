#include "model/safetensors.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>

#include "base/json.h"
#include "model/files_for_test.h"

namespace weft {
namespace {

std::vector<TensorInfo> parse(const std::string& bytes) {
  return parse_safetensors({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, "w.safetensors");
}

std::string parse_error(const std::string& bytes) {
  return error_of([&] { parse(bytes); });
}

// True when one byte was changed, inserted or removed.
bool one_byte_apart(const std::string& a, const std::string& b) {
  const size_t shorter = std::min(a.size(), b.size());
  if (std::max(a.size(), b.size()) - shorter > 1 || a == b) return false;
  size_t front = 0, back = 0;
  while (front < shorter && a[front] == b[front]) ++front;
  while (back < shorter - front && a[a.size() - 1 - back] == b[b.size() - 1 - back]) ++back;
  return front + back >= shorter - (a.size() == b.size() ? 1 : 0);
}

struct BrokenFile {
  std::string label, good, bad, message;
};

// `good` with the only `from` in its header replaced by `to` of the same length.
std::string edited(const std::string& good, const std::string& from, const std::string& to) {
  const size_t at = good.find(from);
  WEFT_CHECK(at != good.npos && from.size() == to.size() && good.find(from, at + 1) == good.npos, "{}", from);
  return std::string(good).replace(at, from.size(), to);
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}";
}

std::string one_tensor(const std::string& dtype, const std::string& shape, const std::string& offsets,
                       size_t data) {
  return safetensors_bytes("{" + entry("odd.weight", dtype, shape, offsets) + " }", counted_bytes(data));
}

std::string two_tensors() {
  return safetensors_bytes(
      "{" + entry("first", "F32", "[2, 3]", "[ 0,24]") + "," + entry("other", "U8", "[4]", "[24,28]") + " }",
      counted_bytes(28));
}

std::vector<BrokenFile> one_byte_cases() {
  const std::string two = two_tensors();
  auto change = [&](const std::string& label, const std::string& from, const std::string& to,
                    const std::string& says) {
    return BrokenFile{label, two, edited(two, from, to), says};
  };
  auto length_byte = [&](const std::string& label, size_t at, char value, const std::string& says) {
    std::string bad = two;
    bad[at] = value;
    return BrokenFile{label, two, bad, says};
  };
  auto alone = [&](const std::string& label, const std::string& dtype, const std::string& shape,
                   const std::string& offsets, size_t data, const std::string& from, const std::string& to,
                   const std::string& says) {
    const std::string good = one_tensor(dtype, shape, offsets, data);
    return BrokenFile{label, good, edited(good, from, to), says};
  };
  const char low = two[0];
  std::vector<BrokenFile> cases = {
      length_byte("length one less", 0, static_cast<char>(low - 1), "tensor"),
      length_byte("length one more", 0, static_cast<char>(low + 1), "not valid JSON"),
      length_byte("length 2^63", 7, '\x80', "header length is 92233720368547"),
      length_byte("length negative as signed", 7, '\xff', "header length is"),
      length_byte("length 2^40", 5, 1, "header length is 10995116"),
      length_byte("length just past the end", 1, 1, "header length is"),
      {"cut by one byte", two, two.substr(0, two.size() - 1), "tensor other: its data ends at byte 28 of 27"},
      change("root is no object", "{\"first\"", "[\"first\"", "not valid JSON"),
      change("no closing brace", "} }", "}  ", "not valid JSON"),
      change("garbage between", "} }", "}x}", "not valid JSON"),
      change("colon lost", "\"first\":", "\"first\" ", "not valid JSON"),
      change("name is not UTF-8", "first", "fir\xfft", "not valid JSON"),
      change("control character in a name", "first", "fir\nt", "not valid JSON"),
      change("unterminated name", "first\"", "first ", "not valid JSON"),
      change("dtype missing", "\"dtype\":\"F32\"", "\"dtypE\":\"F32\"", "tensor first: no dtype"),
      change("shape missing", "\"shape\":[2, 3]", "\"shapE\":[2, 3]", "tensor first: no shape"),
      change("offsets missing", "\"data_offsets\":[ 0", "\"data_offsetz\":[ 0",
             "tensor first: data_offsets is not a pair"),
      change("unknown dtype", "F32", "F33", "tensor first: unknown dtype \"F33\""),
      change("dtype in lower case", "F32", "f32", "tensor first: unknown dtype \"f32\""),
      change("larger shape", "[2, 3]", "[2, 4]",
             "tensor first: F32 [2, 4] takes 32 bytes, data_offsets [0, 24] hold 24"),
      change("smaller shape", "[2, 3]", "[2, 1]", "tensor first: F32 [2, 1] takes 8 bytes"),
      change("zero dimension with data", "[2, 3]", "[2, 0]", "tensor first: F32 [2, 0] takes 0 bytes"),
      change("negative dimension", "[2, 3]", "[2,-3]", "tensor first: dimension 1 of its shape"),
      change("dimension with a letter", "[2, 3]", "[2,x3]", "not valid JSON"),
      change("shape of one number", "[2, 3]", "[2  3]", "not valid JSON"),
      change("begin behind end", "[ 0,24]", "[30,24]", "tensor first: data_offsets [30, 24] are reversed"),
      change("begin moved", "[ 0,24]", "[ 1,24]", "tensor first: F32 [2, 3] takes 24 bytes"),
      change("negative begin", "[ 0,24]", "[-0,24]", "tensor first: data_offsets are not integers"),
      change("end past the file", "[24,28]", "[24,98]", "tensor other: U8 [4] takes 4 bytes"),
      {"names equal",
       safetensors_bytes(
           "{" + entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "U8", "[1]", "[1,2]") + "}", "xy"),
       safetensors_bytes(
           "{" + entry("a", "U8", "[1]", "[0,1]") + "," + entry("a", "U8", "[1]", "[1,2]") + "}", "xy"),
       "\"a\" appears twice"},
      alone("float dimension", "U8", "[200,0]", "[0,0]", 0, "[200,", "[2.0,", "dimension 0 of its shape"),
      alone("dimension with exponent", "U8", "[201,0]", "[0,0]", 0, "[201,", "[2e1,",
            "dimension 0 of its shape"),
      alone("float offset", "U8", "[141]", "[0,141]", 141, "[0,141]", "[0,1e1]",
            "data_offsets are not integers"),
      alone("three offsets", "U8", "[124]", "[0,124]", 124, "[0,124]", "[0,1,4]",
            "data_offsets is not a pair"),
      alone("negative offset", "U8", "[4]", "[ 1,5]", 5, "[ 1,5]", "[-1,5]", "data_offsets are not integers"),
      alone("product wraps to 0", "U8", "[0,4294967296,4294967296]", "[0,0]", 0, "[0,4294967296,",
            "[1,4294967296,", "does not fit into memory"),
      alone("product x size wraps to 0", "F64", "[0,2305843009213693952]", "[0,0]", 0, "[0,23", "[1,23",
            "does not fit into memory"),
      alone("product wraps to the right size", "F32", "[0,4611686018427387905]", "[0,0]", 4, "[0,46", "[1,46",
            "does not fit into memory"),
      alone("dimension of 2^63", "U8", "[0,9223372036854775807]", "[0,0]", 0, "775807]", "775808]",
            "dimension 1 of its shape"),
      alone("shape in quotes", "U8", "[0 ]", "[0,0]", 0, "[0 ]", "[0\"]", "not valid JSON"),
      alone("negative zero", "U8", "[0]", "[ 0, 0]", 0, "[ 0, 0]", "[ 0,-0]",
            "data_offsets are not integers"),
  };
  for (const char* dtype : {"BF16", "F16", "F32", "F64", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64",
                            "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"}) {
    const size_t size = stored_size(*stored_dtype(dtype));
    const std::string end = std::to_string(3 * size);
    std::string wrong = end;
    wrong.back() = wrong.back() == '0' ? '1' : static_cast<char>(wrong.back() - 1);
    cases.push_back(alone(std::string(dtype) + " of wrong size", dtype, "[3]", "[0," + end + "]", 3 * size,
                          "," + end + "]", "," + wrong + "]",
                          std::string("tensor odd.weight: ") + dtype + " [3] takes"));
  }
  return cases;
}

TEST(Safetensors, OneWrongByteIsRefusedAndItsControlLoads) {
  const std::vector<BrokenFile> cases = one_byte_cases();
  EXPECT_GE(cases.size(), 40u);
  for (const BrokenFile& file : cases) {
    SCOPED_TRACE(file.label);
    EXPECT_TRUE(one_byte_apart(file.good, file.bad));
    EXPECT_LT(file.bad.size(), 1024u);
    EXPECT_EQ(parse_error(file.good), "");
    const std::string message = parse_error(file.bad);
    EXPECT_EQ(message.rfind("w.safetensors", 0), 0u) << message;
    EXPECT_SAYS(message, file.message);
    EXPECT_LT(message.size(), 400u);
    EXPECT_EQ(message, printable(message, message.size() + 1)) << "one line of valid UTF-8";
  }
}

TEST(Safetensors, LargerDamageIsRefusedToo) {
  const std::string two = two_tensors();
  auto with_length = [&](uint64_t length) {
    std::string bytes = two;
    std::memcpy(bytes.data(), &length, 8);
    return bytes;
  };
  auto header = [](const std::string& text, size_t data = 8) {
    return safetensors_bytes(text, counted_bytes(data));
  };
  const BrokenFile cases[] = {
      {"length 2^64-3", "", with_length(~uint64_t{0} - 2), "header length is 18446744073709551613"},
      {"length 2^64-8", "", with_length(~uint64_t{0} - 7), "header length is"},
      {"length 0", "", with_length(0), "header of 0 bytes"},
      {"length 1", "", with_length(1), "header of 1 bytes"},
      {"length is the file's", "", with_length(two.size()), "header length is"},
      {"array", "", header("[]"), "header is not a JSON object"},
      {"number", "", header("17"), "header is not a JSON object"},
      {"null", "", header("null"), "header is not a JSON object"},
      {"entry null", "", header(R"({"a":null})"), "tensor a: its header entry"},
      {"entry array", "", header(R"({"a":[]})"), "tensor a: its header entry"},
      {"dtype number", "", header(R"({"a":{"dtype":7,"shape":[],"data_offsets":[0,1]}})"),
       "tensor a: no dtype"},
      {"dtype empty", "", header("{" + entry("a", "", "[]", "[0,1]") + "}"), "tensor a: unknown dtype"},
      {"unknown dtype, offset 2^60", "",
       header("{" + entry("a", "F99", "[]", "[0,1152921504606846976]") + "}"), "tensor a: unknown dtype"},
      {"shape number", "", header("{" + entry("a", "U8", "1", "[0,1]") + "}"), "tensor a: no shape"},
      {"shape of strings", "", header("{" + entry("a", "U8", "[\"1\"]", "[0,1]") + "}"), "dimension 0"},
      {"shape of arrays", "", header("{" + entry("a", "U8", "[[1]]", "[0,1]") + "}"), "dimension 0"},
      {"dimension null", "", header("{" + entry("a", "U8", "[null]", "[0,1]") + "}"), "dimension 0"},
      {"dimension true", "", header("{" + entry("a", "U8", "[true]", "[0,1]") + "}"), "dimension 0"},
      {"one offset", "", header("{" + entry("a", "U8", "[1]", "[0]") + "}"),
       "tensor a: data_offsets is not a pair"},
      {"no offsets", "", header("{" + entry("a", "U8", "[1]", "[]") + "}"),
       "tensor a: data_offsets is not a pair"},
      {"offset null", "", header("{" + entry("a", "U8", "[1]", "[0,null]") + "}"), "tensor a: data_offsets"},
      {"offset 2^64", "", header("{" + entry("a", "U8", "[1]", "[0,18446744073709551616]") + "}"),
       "tensor a"},
      {"shape and offsets fit, file does not", "",
       header("{" + entry("a", "F32", "[1000,1000]", "[0,4000000]") + "}", 4),
       "tensor a: its data ends at byte 4000000 of 4"},
      {"same, far away", "",
       header("{" + entry("a", "U8", "[1]", "[9223372036854775806,9223372036854775807]") + "}", 4),
       "tensor a: its data ends at byte"},
      {"other known dtype", "", edited(two, "F32", "F16"), "tensor first: F16 [2, 3] takes 12 bytes"},
      {"overlap by one", "",
       header("{" + entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[3,7]") + "}"),
       "tensors a and b overlap"},
      {"same place", "",
       header("{" + entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[0,4]") + "}"),
       "tensors a and b overlap"},
      {"inside, an empty one between", "",
       header("{" + entry("a", "U8", "[8]", "[0,8]") + "," + entry("b", "U8", "[0]", "[2,2]") + "," +
              entry("c", "U8", "[2]", "[3,5]") + "}"),
       "tensors a and c overlap"},
      {"deep", "", header("{\"a\":" + std::string(400, '[')), "nested deeper"},
      {"deep in metadata", "", header("{\"__metadata__\":" + std::string(200'000, '[')), "nested deeper"},
      {"field twice", "", header(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})"),
       "\"dtype\" appears twice"},
      {"empty", "", "", "is empty, not a safetensors file"},
      {"seven bytes", "", std::string("\x02\0\0\0\0\0\0", 7), "7 bytes are too few"},
      {"eight bytes", "", std::string("\x02\0\0\0\0\0\0\0", 8), "header length is 2"},
      {"zeros", "", std::string(1000, '\0'), "starts with zeros"},
      {"git-LFS", "", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
       "git-LFS pointer"},
      {"HTML", "", "<!DOCTYPE html>\n<html><body>Please log in</body></html>", "is an HTML page"},
      {"HTML after a line", "", "\n  <HTML lang=en>", "is an HTML page"},
      {"GGUF", "", std::string("GGUF\x03\0\0\0\0\0\0\0", 12), "is a GGUF file"},
      {"zip", "", "PK\x03\x04 archive/data.pkl", "is a zip archive"},
  };
  EXPECT_EQ(parse_error(two), "");
  for (const BrokenFile& file : cases) {
    SCOPED_TRACE(file.label);
    const std::string message = parse_error(file.bad);
    EXPECT_EQ(message.rfind("w.safetensors", 0), 0u) << message;
    EXPECT_SAYS(message, file.message);
    EXPECT_LT(message.size(), 400u);
    EXPECT_EQ(message, printable(message, message.size() + 1));
  }
}

TEST(Safetensors, EveryCutOfAFileIsRefused) {
  const std::string two = two_tensors();
  for (size_t size = 0; size < two.size(); ++size) EXPECT_NE(parse_error(two.substr(0, size)), "") << size;
}

TEST(Safetensors, GivesNamesShapesAndBytes) {
  const std::string bytes = two_tensors();
  const std::vector<TensorInfo> tensors = parse(bytes);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "first");
  EXPECT_EQ(tensors[0].dtype, StoredDtype::f32);
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensors[0].elements(), 6u);
  EXPECT_EQ(tensors[1].bytes, 4u);
  EXPECT_EQ(std::memcmp(tensors[1].data, counted_bytes(28).data() + 24, 4), 0);
  EXPECT_EQ(tensors[0].file, "w.safetensors");
}

TEST(Safetensors, EmptyTensorsScalarsGapsAndMetadataAreLegal) {
  std::string metadata = "\"__metadata__\":{";
  for (int i = 0; i < 1000; ++i)
    metadata += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\xe6\xa8\xa1\xe5\x9e\x8b\"";
  const std::string bytes = safetensors_bytes(
      "{" + metadata + "}," + entry("marker", "F32", "[0]", "[3,3]") + "," +
          entry("m2", "BF16", "[2,0]", "[15,15]") + "," + entry("scalar", "I64", "[]", "[7,15]") + "," +
          entry("late", "U8", "[5]", "[1,6]") + "," +
          entry("vast", "F64", "[4294967296,4294967296,0]", "[0,0]") + "}",
      counted_bytes(15));
  const std::vector<TensorInfo> tensors = parse(bytes);
  ASSERT_EQ(tensors.size(), 5u);
  for (const TensorInfo& tensor : tensors) {
    const size_t elements = tensor.name == "scalar" ? 1 : tensor.name == "late" ? 5 : 0;
    EXPECT_EQ(tensor.elements(), elements) << tensor.name;
  }
  EXPECT_TRUE(parse(safetensors_bytes("{}", "")).empty());
}

TEST(Safetensors, DataAtOddAddressesReadsRight) {
  const float values[] = {1.5f, -2.25f, 3e30f};
  for (size_t spaces = 0; spaces < 8; ++spaces) {
    for (size_t lead = 0; lead < 4; ++lead) {
      std::string data(lead, 'x');
      data.append(reinterpret_cast<const char*>(values), sizeof values);
      const std::string pad = entry("pad", "U8", fmt::format("[{}]", lead), fmt::format("[0,{}]", lead));
      const std::string w = entry("w", "F32", "[3]", fmt::format("[{},{}]", lead, lead + 12));
      const std::string header = fmt::format("{{{},{}}}{:{}}", pad, w, "", spaces);
      const std::string bytes = safetensors_bytes(header, data);
      const std::vector<TensorInfo> tensors = parse(bytes);
      float read[2] = {};
      read_elements(tensors.back(), 1, 2, read);
      EXPECT_EQ(read[0], -2.25f);
      EXPECT_EQ(read[1], 3e30f);
    }
  }
}

TEST(SafetensorsFile, RefusesWhatIsNoRegularFile) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_SAYS(error_of([&] { SafetensorsFile file(folder / "pipe"); }), "pipe is not a regular file");
  EXPECT_SAYS(error_of([&] { SafetensorsFile file(folder.path()); }), "is not a regular file");
  EXPECT_SAYS(error_of([&] { SafetensorsFile file(folder / "none"); }), "none: cannot open: No such file");
  write_bytes(folder / "empty", "");
  EXPECT_SAYS(error_of([&] { SafetensorsFile file(folder / "empty"); }), "empty is empty");
}

TEST(SafetensorsFile, RefusesAHugeHeaderWithoutReadingIt) {
  const TemporaryFolder folder;
  std::string length(8, '\0');
  length[3] = 0x10;  // 256 MiB, really there as a hole
  write_bytes(folder / "w", length + "{");
  std::filesystem::resize_file(folder / "w", 300u << 20);
  EXPECT_SAYS(error_of([&] { SafetensorsFile file(folder / "w"); }), "over the limit");
}

TEST(SafetensorsFile, NoticesOnlyChangesOfTheMappedFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "w";
  const std::string content = safetensors_of({"a", "b"}, 5000);
  auto fresh = [&] {
    std::filesystem::remove(path);
    write_bytes(path, content);
    return std::make_unique<SafetensorsFile>(path);
  };
  auto message = [](const SafetensorsFile& file) { return error_of([&] { file.check_unchanged(); }); };

  auto file = fresh();
  EXPECT_EQ(message(*file), "");
  std::filesystem::resize_file(path, content.size() / 2);
  EXPECT_SAYS(message(*file), path);
  EXPECT_SAYS(message(*file), "something is still writing it");

  file = fresh();
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
  EXPECT_SAYS(message(*file), "was rewritten");

  file = fresh();
  std::filesystem::remove(path);
  EXPECT_EQ(message(*file), "");
  EXPECT_EQ(static_cast<char>(file->tensors()[0].data[4999]), 'A');

  file = fresh();
  write_bytes(path + ".new", "other");
  std::filesystem::rename(path + ".new", path);
  EXPECT_EQ(message(*file), "");
  EXPECT_EQ(static_cast<char>(file->tensors()[1].data[4999]), 'B');
}

TEST(SafetensorsFile, ReleasedPagesReadTheSameAgain) {
  const TemporaryFolder folder;
  write_bytes(folder / "w", safetensors_of({"a", "b", "c"}, 100'001));
  const SafetensorsFile file(folder / "w");
  for (const TensorInfo& tensor : file.tensors()) release_pages(tensor);
  for (size_t i = 0; i < 3; ++i) {
    for (size_t at : {size_t{0}, size_t{50'000}, size_t{100'000}})
      EXPECT_EQ(static_cast<char>(file.tensors()[i].data[at]), static_cast<char>('A' + i));
  }
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TemporaryFolder folder;
  const std::string data = counted_bytes(3'000'000);
  for (size_t first : {size_t{1000}, size_t{999'999}, size_t{3'000'000}}) {
    SafetensorsWriter writer(folder / "w.safetensors");
    writer.declare("z.weight", StoredDtype::bf16, {3, 250'000});
    writer.declare("empty", StoredDtype::f32, {0, 7});
    writer.declare("a.scale \xe6\xa8\xa1", StoredDtype::u8, {1'499'992});
    writer.declare("scalar", StoredDtype::f64, {});
    EXPECT_FALSE(std::filesystem::exists(folder / "w.safetensors"));
    // A long piece after a short one must not overtake it.
    for (size_t at = 0, piece = first; at < data.size(); at += piece, piece = piece * 1500 % 1'700'003) {
      piece = std::min(piece, data.size() - at);
      writer.write(data.data() + at, piece);
    }
    writer.finish();
    const SafetensorsFile file(folder / "w.safetensors");
    ASSERT_EQ(file.tensors().size(), 4u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensors()[0].data) % 8, 0u);
    std::string read(data.size(), '\0');
    for (const TensorInfo& tensor : file.tensors())
      std::memcpy(read.data() + (tensor.data - file.tensors()[0].data), tensor.data, tensor.bytes);
    EXPECT_TRUE(read == data);
    EXPECT_EQ(file.tensors()[0].name, "z.weight");
    EXPECT_EQ(file.tensors().back().name, "scalar");
    std::filesystem::remove(folder / "w.safetensors");
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsWriter, LeavesNothingBehindWhenAbandoned) {
  const TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder / "w");
    writer.declare("a", StoredDtype::u8, {4});
    writer.write("ab", 2);
    EXPECT_FALSE(std::filesystem::is_empty(folder.path()));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsWriter, NamesPathAndReason) {
  const TemporaryFolder folder;
  SafetensorsWriter nowhere(folder / "no/such/w");
  EXPECT_SAYS(error_of([&] { nowhere.finish(); }), "no/such/w: cannot create it: No such file or directory");
  SafetensorsWriter wrong(folder / "w");
  EXPECT_SAYS(error_of([&] {
                wrong.declare("t", StoredDtype::f32, {int64_t{1} << 40, int64_t{1} << 40});
              }),
              "tensor t: impossible shape");
  EXPECT_SAYS(error_of([&] { wrong.declare("t", StoredDtype::f32, {-1}); }), "impossible shape [-1]");
}

TEST(SafetensorsWriter, SaysWhenTheDiskIsFull) {
  const TemporaryFolder folder;
  const std::string path = folder / "w";
  // A file size limit fails write() as a full disk does; it binds a process for good, so a child takes it.
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {2'000'000, 2'000'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string message = error_of([&] {
      SafetensorsWriter writer(path);
      writer.declare("a", StoredDtype::u8, {3'000'000});
      for (int i = 0; i < 3; ++i) writer.write(counted_bytes(1'000'000).data(), 1'000'000);
      writer.finish();
    });
    ::_exit(message.find(path + ": cannot write: File too large") == message.npos ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace weft
