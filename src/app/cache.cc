// weft cache: the packed weights that are kept between starts.
#include <memory>

#include "app/cli.h"
#include "app/report.h"
#include "base/check.h"
#include "model/pack_cache.h"

namespace weft {

void add_cache(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("cache", "List or clear the packed weights kept between starts");
  sub->require_subcommand(1);
  auto folder = std::make_shared<std::string>();
  const auto chosen = [folder] {
    const std::string found = folder->empty() ? PackCache::default_folder() : *folder;
    if (found.empty()) usage("no HOME and no XDG_CACHE_HOME: name the folder with --cache-dir");
    return found;
  };
  CLI::App* list = sub->add_subcommand("ls", "Show them, the last used first");
  CLI::App* clear = sub->add_subcommand("clear", "Remove them");
  for (CLI::App* each : {list, clear})
    each->add_option("--cache-dir", *folder, "The folder (default: ~/.cache/weft)")->type_name("DIR");
  list->callback([chosen] {
    size_t sum = 0;
    for (const PackCacheEntry& e : PackCache::list(chosen())) {
      fmt::print("{:>11}  {}  {}\n", human_bytes(e.bytes), e.model, e.file);
      sum += e.bytes;
    }
    fmt::print("{:>11}  in {}\n", human_bytes(sum), chosen());
  });
  clear->callback(
      [chosen] { fmt::print("freed {} in {}\n", human_bytes(PackCache::clear(chosen())), chosen()); });
}

}  // namespace weft
