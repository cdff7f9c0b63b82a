# One object per instruction set, from the first line of tile/isa/<name>.h:
#   // isa: name=avx2 rank=1 flags=-mavx2,-mfma needs=avx2
# and the list that dispatch.cc includes. Adding an ISA is adding one header.
file(GLOB isa_headers CONFIGURE_DEPENDS src/tile/isa/*.h)
set(isa_declarations "")
set(isa_entries "")
set(isa_objects "")

function(weft_isa_unit name header flags definitions)
  set(ISA ${name})
  set(ISA_HEADER ${header})
  configure_file(src/kernels/unit.cc.in ${CMAKE_BINARY_DIR}/isa/${name}.cc @ONLY)
  add_library(weft_isa_${name} OBJECT ${CMAKE_BINARY_DIR}/isa/${name}.cc)
  # No sanitizer here: its inline runtime would add symbols, and the kernels are checked through padded buffers.
  target_include_directories(weft_isa_${name} PRIVATE src)
  string(REPLACE "," ";" flag_list "${flags}")
  target_compile_options(weft_isa_${name} PRIVATE -Wall -Wextra -Wno-unused-function -Wno-unused-parameter
                         -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-ignored-attributes -fno-math-errno -fno-trapping-math -ffp-contract=off
                         -fno-exceptions -fno-rtti ${flag_list})
  target_compile_definitions(weft_isa_${name} PRIVATE NDEBUG ${definitions})
endfunction()

foreach(path ${isa_headers})
  file(STRINGS ${path} first_line LIMIT_COUNT 1)
  if(NOT first_line MATCHES "^// isa: name=([a-z0-9]+) rank=([0-9]+) flags=([^ ]*) needs=([a-z0-9]*)")
    continue()
  endif()
  set(name ${CMAKE_MATCH_1})
  set(rank ${CMAKE_MATCH_2})
  set(flags ${CMAKE_MATCH_3})
  set(needs ${CMAKE_MATCH_4})
  get_filename_component(header ${path} NAME)
  weft_isa_unit(${name} ${header} "${flags}" "")
  string(APPEND isa_declarations "extern const KernelTable kernel_table_${name};\n")
  list(APPEND isa_entries "${rank}|    {&kernel_table_${name}, \"${needs}\"},")
  target_link_libraries(weft_kernels INTERFACE $<TARGET_OBJECTS:weft_isa_${name}>)
  add_dependencies(weft_kernels weft_isa_${name})
  if(name STREQUAL "amx")
    set(amx_flags ${flags})
  endif()
endforeach()

list(SORT isa_entries COMPARE NATURAL ORDER DESCENDING)  # best first
set(isa_list "")
foreach(entry ${isa_entries})
  string(REGEX REPLACE "^[0-9]+\\|" "" entry "${entry}")
  string(APPEND isa_list "${entry}\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/isa/isa_list.inc CONTENT
"// made by cmake/isa_units.cmake
${isa_declarations}struct IsaEntry {
  const KernelTable* table;
  const char* needs;
};
const IsaEntry kIsas[] = {
${isa_list}};
")
target_include_directories(weft_kernels PRIVATE ${CMAKE_BINARY_DIR}/isa)

# Test only: the amx kernels over a software model of the tile instructions.
weft_isa_unit(amxmodel amx.h "${amx_flags}" WEFT_TILE_MODEL)
add_library(weft_amx_model INTERFACE)
target_link_libraries(weft_amx_model INTERFACE $<TARGET_OBJECTS:weft_isa_amxmodel>)
