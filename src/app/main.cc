#include "app/cli.h"

int main(int argc, char** argv) {
  return weft::run_cli(argc, argv);
}
