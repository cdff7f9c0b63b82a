# A model family is one file that nothing refers to, inside a static library: without being asked for by name it
# would not be linked (see WEFT_ARCH_FILE in src/model/arch.h).
file(GLOB weft_arch_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/model/arch/*.cc)
foreach(source ${weft_arch_files})
  get_filename_component(name ${source} NAME_WE)
  target_link_options(weft_model INTERFACE "LINKER:--undefined=weft_arch_file_${name}")
endforeach()
