# No fused multiply-adds, so that the same file comes out on every machine.
file(GLOB synth_sources ${CMAKE_CURRENT_SOURCE_DIR}/synth*.cc)
set_source_files_properties(${synth_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
