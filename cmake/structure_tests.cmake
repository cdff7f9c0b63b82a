# The rules of docs/design.md that a machine can check: tests/structure/*.sh.
set(structure ${CMAKE_SOURCE_DIR}/tests/structure)
add_test(NAME structure_layers COMMAND ${structure}/layers.sh ${CMAKE_SOURCE_DIR})
add_test(NAME structure_sources COMMAND ${structure}/sources.sh ${CMAKE_SOURCE_DIR})
add_test(NAME structure_rules_can_fail
         COMMAND ${structure}/rules_can_fail.sh ${CMAKE_SOURCE_DIR} ${CMAKE_CXX_COMPILER})

add_custom_target(structure_objects)  # what the tests below read
get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
set(layer_files "")
foreach(target ${targets})
  get_target_property(type ${target} TYPE)
  if(target MATCHES "^weft_isa_(.*)$")
    add_test(NAME structure_isa_${CMAKE_MATCH_1}
             COMMAND ${structure}/isa_object.sh ${CMAKE_MATCH_1} $<TARGET_OBJECTS:${target}>)
    add_dependencies(structure_objects ${target})
  elseif(type STREQUAL "STATIC_LIBRARY" AND target MATCHES "^weft_")
    list(APPEND layer_files $<TARGET_FILE:${target}>)
    add_dependencies(structure_objects ${target})
  endif()
endforeach()
add_test(NAME structure_baseline_code COMMAND ${structure}/baseline_code.sh ${layer_files})
