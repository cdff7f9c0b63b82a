#include "model/checkpoint.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include "base/json.h"
#include "model/files_for_test.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

const char* const kShards[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};

std::string index_of(const std::vector<std::pair<std::string, std::string>>& map) {
  Json index = {{"metadata", {{"total_size", 16}}}, {"weight_map", Json::object()}};
  for (const auto& [tensor, file] : map) index["weight_map"][tensor] = file;
  return index.dump();
}

// Two shards: {a, b} and {c, d}, four bytes each.
void write_sharded(const std::string& folder) {
  fs::create_directories(folder);
  write_bytes(folder + "/config.json", "{\"model_type\": \"toy\"}");
  write_bytes(folder + "/" + kShards[0], safetensors_of({"a", "b"}));
  write_bytes(folder + "/" + kShards[1], safetensors_of({"c", "d"}));
  write_bytes(folder + "/model.safetensors.index.json",
              index_of({{"a", kShards[0]}, {"b", kShards[0]}, {"c", kShards[1]}, {"d", kShards[1]}}));
}

void write_single(const std::string& folder) {
  fs::create_directories(folder);
  write_bytes(folder + "/config.json", "{\"model_type\": \"toy\"}");
  write_bytes(folder + "/model.safetensors", safetensors_of({"x", "y"}));
}

std::string open_error(const std::string& path) {
  return error_of([&] { Checkpoint checkpoint(path); });
}

TEST(Checkpoint, FindsTensorsOfOneFile) {
  const TemporaryFolder folder;
  write_single(folder.path());
  const Checkpoint checkpoint(folder.path());
  ASSERT_NE(checkpoint.find("y"), nullptr);
  EXPECT_EQ(static_cast<char>(checkpoint.find("y")->data[3]), 'B');
  EXPECT_EQ(checkpoint.find("y")->file, folder / "model.safetensors");
  for (const char* absent : {"", "w", "xx", "z"}) EXPECT_EQ(checkpoint.find(absent), nullptr);
  EXPECT_SAYS(error_of([&] { checkpoint.use("z"); }), folder.path() + ": the weights hold no tensor z");
  EXPECT_EQ(checkpoint.config_path(), folder / "config.json");
}

TEST(Checkpoint, FindsTensorsOfShards) {
  const TemporaryFolder folder;
  write_sharded(folder.path());
  const Checkpoint checkpoint(folder.path());
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string_view>{"a", "b", "c", "d"}));
  EXPECT_EQ(static_cast<char>(checkpoint.use("d").data[0]), 'B');
  EXPECT_EQ(checkpoint.find("c")->file, folder / kShards[1]);
}

TEST(Checkpoint, RefusesABadIndexButLoadsItsControl) {
  const TemporaryFolder folder;
  write_sharded(folder.path());
  const std::string index = folder / "model.safetensors.index.json";
  using Map = std::vector<std::pair<std::string, std::string>>;
  const Map good = {{"a", kShards[0]}, {"b", kShards[0]}, {"c", kShards[1]}, {"d", kShards[1]}};
  auto with = [&](size_t at, const std::string& tensor, const std::string& file) {
    Map map = good;
    map[at] = {tensor, file};
    return index_of(map);
  };
  const std::pair<std::string, std::string> cases[] = {
      {with(3, "d", kShards[0]), "tensor d should be in model-00001-of-00002.safetensors"},
      {with(3, "D", kShards[1]), "tensor D should be in model-00002-of-00002.safetensors"},
      {index_of({good[0], good[1], good[2]}), "does not list tensor d of model-00002"},
      {with(2, "c", "model-00003-of-00002.safetensors"), "1 of 3 shards are missing: model-00003"},
      {with(2, "c", ""), "tensor c is in \"\", expected the name of a file"},
      {with(2, "c", ".."), "tensor c is in \"..\""},
      {with(2, "c", "../" + std::string(kShards[1])), "tensor c is in \"../model-00002"},
      {with(2, "c", "./" + std::string(kShards[1])), "tensor c is in \"./model-00002"},
      {with(2, "c", folder / kShards[1]), "expected the name of a file in the same folder"},
      {with(2, "c", "sub\\w.safetensors"), "expected the name of a file in the same folder"},
      {with(2, "c", std::string(kShards[1]) + std::string(1, '\0')), "expected the name of a file"},
      {R"({"weight_map": {"a": 1}})", "the file of tensor a is not a string"},
      {R"({"weight_map": {}})", "weight_map is empty"},
      {R"({"weight_map": ["a"]})", "weight_map is an array of 1, expected an object"},
      {R"({"weight_mop": {}})", "weight_map is missing"},
      {R"({"weight_map": {"a": "f", "a": "f"}})", "\"a\" appears twice"},
      {"[]", "expected a JSON object"},
      {"", "is empty"},
      {"{", "not valid JSON"},
      {std::string(200'000, '['), "nested deeper"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-LFS pointer"},
  };
  for (const auto& [text, says] : cases) {
    SCOPED_TRACE(says);
    write_bytes(index, index_of(good));
    EXPECT_EQ(open_error(folder.path()), "");
    write_bytes(index, text);
    const std::string message = open_error(folder.path());
    EXPECT_EQ(message.rfind(index, 0), 0u) << message;
    EXPECT_SAYS(message, says);
    EXPECT_EQ(message, printable(message, message.size() + 1));
    EXPECT_LT(message.size(), 700u);
  }
}

TEST(Checkpoint, NamesTheShardThatIsNoSafetensorsFile) {
  const TemporaryFolder folder;
  const std::pair<std::string, const char*> cases[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git-LFS pointer"},
      {"<!doctype html><html></html>", "HTML page"},
      {"", "is empty, not a safetensors file"},
      {std::string(300, '\0'), "starts with zeros"},
      {safetensors_of({"c", "d"}).substr(0, 100), "cut short"},
  };
  for (const auto& [content, says] : cases) {
    write_sharded(folder.path());
    write_bytes(folder / kShards[1], content);
    const std::string message = open_error(folder.path());
    EXPECT_SAYS(message, folder / kShards[1]);
    EXPECT_SAYS(message, says);
  }
}

TEST(Checkpoint, SaysWhatAFolderHoldsInstead) {
  const TemporaryFolder folder;
  EXPECT_SAYS(open_error(folder / "none"), "none: no such file or directory");
  EXPECT_SAYS(open_error(""), "model path is empty");
  write_bytes(folder / "config.json", "{}");
  EXPECT_SAYS(open_error(folder / "config.json"), "is a file: give the folder");
  EXPECT_SAYS(open_error(folder.path()), "neither model.safetensors nor model.safetensors.index.json");
  write_bytes(folder / "pytorch_model.bin", "x");
  EXPECT_SAYS(open_error(folder.path()), "(it holds pytorch_model.bin)");
}

// A download cache: blobs without suffix, a snapshot of links to them, refs/main.
class DownloadCache : public testing::Test {
 protected:
  DownloadCache() : root_(folder_ / "models--some--toy-model"), snapshot_(root_ + "/snapshots/abc123") {
    write_sharded(root_ + "/plain");
    fs::create_directories(root_ + "/blobs");
    fs::create_directories(root_ + "/refs");
    fs::create_directories(snapshot_);
    int number = 0;
    for (const auto& entry : fs::directory_iterator(root_ + "/plain")) {
      const std::string blob = "blob" + std::to_string(number++);
      fs::rename(entry.path(), root_ + "/blobs/" + blob);
      fs::create_symlink("../../blobs/" + blob, snapshot_ + "/" + entry.path().filename().string());
    }
    fs::remove(root_ + "/plain");
    write_bytes(root_ + "/refs/main", "abc123\n");
  }
  TemporaryFolder folder_;
  std::string root_, snapshot_;
};

TEST_F(DownloadCache, EverySpellingIsOneModel) {
  const uint64_t identity = Checkpoint(snapshot_).identity();
  fs::create_directory_symlink(snapshot_, folder_ / "link");
  for (const std::string& path :
       {snapshot_, snapshot_ + "/", snapshot_ + "///", snapshot_ + "/../abc123", snapshot_ + "/.", root_,
        root_ + "/", root_ + "/snapshots/../", folder_ / "link", folder_ / "link/"}) {
    SCOPED_TRACE(path);
    const Checkpoint checkpoint(path);
    EXPECT_EQ(checkpoint.identity(), identity);
    EXPECT_EQ(checkpoint.name(), "some/toy-model");
    EXPECT_EQ(static_cast<char>(checkpoint.use("d").data[0]), 'B');
  }
}

TEST_F(DownloadCache, NamesWhatIsMissing) {
  write_bytes(root_ + "/refs/main", "def456");
  EXPECT_SAYS(open_error(root_), "refs/main names snapshot def456, which is not in");
  write_bytes(root_ + "/refs/main", "../../x");
  EXPECT_SAYS(open_error(root_), "names snapshot ../../x");
  fs::remove(root_ + "/refs/main");
  EXPECT_SAYS(open_error(root_), "give one of its snapshot folders (abc123)");

  const std::string shard = snapshot_ + "/" + kShards[1];
  const std::string target = fs::read_symlink(shard).string();
  fs::remove(fs::canonical(shard));
  EXPECT_SAYS(open_error(snapshot_), shard + " is a link to " + target + ", which does not exist");
  fs::create_directory_symlink(folder_ / "gone", folder_ / "link");
  EXPECT_SAYS(open_error(folder_ / "link/"), folder_ / "link is a link to " + (folder_ / "gone"));
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    fs::create_directories(folder_ / name);
    fs::create_symlink("nothing", folder_ / name + "/" + name);
    EXPECT_SAYS(open_error(folder_ / name), std::string("/") + name + " is a link to nothing");
  }
}

TEST(Checkpoint, TakesAnyFolderName) {
  const TemporaryFolder folder;
  for (const std::string& name :
       {std::string("with space"), std::string("-leading"), std::string("\xe6\xa8\xa1\xe5\x9e\x8b"),
        std::string("quote'\""), std::string("new\nline"), std::string("\xff\xfe"), std::string(250, 'n')}) {
    write_single(folder / name);
    EXPECT_EQ(Checkpoint(folder / name + "//").name(), name);
    fs::permissions(folder / name, fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_EQ(open_error(folder / name), "");
    fs::permissions(folder / name, fs::perms::owner_all);
    write_bytes(folder / name + "/model.safetensors", "x");
    const std::string message = open_error(folder / name);
    EXPECT_EQ(message, printable(message, message.size() + 1));
  }
  write_single(folder / "deep/er");
  EXPECT_EQ(Checkpoint(folder / "deep/er/..//er").name(), "er");
  EXPECT_EQ(Checkpoint(folder / "deep/er/.").name(), "er");
}

TEST(Checkpoint, IdentityFollowsContentNotPlace) {
  const TemporaryFolder folder;
  write_sharded(folder / "m");
  const uint64_t first = Checkpoint(folder / "m").identity();
  fs::rename(folder / "m", folder / "elsewhere");
  EXPECT_EQ(Checkpoint(folder / "elsewhere").identity(), first);

  const std::string shard = folder / "elsewhere/" + kShards[1];
  const auto time = fs::last_write_time(shard);
  fs::last_write_time(shard, time + std::chrono::microseconds(1));
  EXPECT_NE(Checkpoint(folder / "elsewhere").identity(), first);
  fs::last_write_time(shard, time);
  EXPECT_EQ(Checkpoint(folder / "elsewhere").identity(), first);

  std::string other = safetensors_of({"c", "d"});
  other[other.find("U8")] = 'I';  // same size, same time, other dtype
  write_bytes(shard, other);
  fs::last_write_time(shard, time);
  EXPECT_NE(Checkpoint(folder / "elsewhere").identity(), first);
  write_bytes(shard, safetensors_of({"c", "d"}));
  fs::last_write_time(shard, time);
  EXPECT_EQ(Checkpoint(folder / "elsewhere").identity(), first);

  write_bytes(folder / "elsewhere/config.json", "{\"model_type\": \"top\"}");
  EXPECT_NE(Checkpoint(folder / "elsewhere").identity(), first);
}

TEST(Checkpoint, CountsUnusedTensorsByPrefix) {
  const TemporaryFolder folder;
  fs::create_directories(folder.path());
  write_bytes(
      folder / "model.safetensors",
      safetensors_of({"lm_head.weight", "model.layers.0.q.weight", "model.layers.1.q.weight",
                      "model.layers.1.k.weight", "model.layers.10.q.weight", "vision.norm.weight", "odd"}));
  const Checkpoint checkpoint(folder.path());
  EXPECT_NE(checkpoint.find("lm_head.weight"), nullptr);  // a look is no use
  EXPECT_EQ(checkpoint.unused_summary(),
            "7 tensors not used: model.layers.1 (2), lm_head (1), model.layers.0 (1), model.layers.10 (1), "
            "odd (1) and "
            "1 more");
  checkpoint.use("model.layers.1.k.weight");
  checkpoint.use("odd");
  EXPECT_EQ(checkpoint.unused_summary(),
            "5 tensors not used: lm_head (1), model.layers.0 (1), model.layers.1 (1), model.layers.10 (1), "
            "vision (1)");
  for (std::string_view name : checkpoint.names()) checkpoint.use(name);
  EXPECT_EQ(checkpoint.unused_summary(), "");
}

TEST(Checkpoint, NoticesAShardThatIsCutWhileLoading) {
  const TemporaryFolder folder;
  write_sharded(folder.path());
  const Checkpoint checkpoint(folder.path());
  EXPECT_EQ(error_of([&] { checkpoint.check_unchanged(); }), "");
  fs::resize_file(folder / kShards[1], 50);
  EXPECT_SAYS(error_of([&] { checkpoint.check_unchanged(); }), folder / kShards[1]);
}

TEST(Checkpoint, HundredsOfShardsNeedFewDescriptors) {
  const TemporaryFolder folder;
  std::vector<std::pair<std::string, std::string>> map;
  for (int i = 0; i < 300; ++i) {
    map.emplace_back(fmt::format("t{}", i), fmt::format("shard{}.safetensors", i));
    write_bytes(folder / map.back().second, safetensors_of({map.back().first}));
  }
  write_bytes(folder / "model.safetensors.index.json", index_of(map));
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low = {64, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  {
    const Checkpoint checkpoint(folder.path());
    EXPECT_EQ(checkpoint.tensors().size(), 300u);
    for (const TensorInfo& tensor : checkpoint.tensors()) {
      EXPECT_EQ(static_cast<char>(tensor.data[3]), 'A');
      checkpoint.release(tensor);
    }
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace weft
