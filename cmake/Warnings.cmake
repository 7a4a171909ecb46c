# flashdsa_warnings: what every target of ours is compiled with.
add_library(flashdsa_warnings INTERFACE)
target_compile_options(flashdsa_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;-Wshadow;-Wpedantic>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FLASHDSA_WERROR}>>:-Werror>)
