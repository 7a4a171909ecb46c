# Checks of the tree itself: headers, includes, documentation.

find_package(Python3 REQUIRED COMPONENTS Interpreter)

# Every public header compiles alone, twice in one file, with nothing but include/ to look in.
file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include
     ${PROJECT_SOURCE_DIR}/include/flashdsa/*.h)
set(sources)
foreach(header IN LISTS headers)
  string(REPLACE ".h" ".cc" source ${CMAKE_CURRENT_BINARY_DIR}/public_headers/${header})
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
  list(APPEND sources ${source})
endforeach()
add_library(public_headers OBJECT EXCLUDE_FROM_ALL ${sources})
target_include_directories(public_headers PRIVATE ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(public_headers PRIVATE flashdsa_warnings)
add_test(NAME support.PublicHeaders.CompileAlone
         COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target public_headers)

# Who may include whom.
add_test(NAME support.Includes.KeepTheRules
         COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/check_includes.py
                 ${PROJECT_SOURCE_DIR})

# Links and quoted examples of the documentation.
add_test(NAME support.Docs.QuoteWhatRuns
         COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/check_docs.py
                 ${PROJECT_SOURCE_DIR})

# Figures of the pages have their rows.
add_test(NAME support.Docs.FiguresHaveRows
         COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/check_figures.py
                 ${PROJECT_SOURCE_DIR})

# Tables of the pages, from the command and from bench/results.
add_test(NAME support.Docs.TablesAreCurrent
         COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/docs/tools/tables.py
                 ${PROJECT_SOURCE_DIR} $<TARGET_FILE:flashdsa_command>)

foreach(checker check_docs check_figures check_includes results summary tables undocumented)
  add_test(NAME support.${checker}.FindsFaults
           COMMAND Python3::Interpreter -m unittest -v ${checker}_test
           WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR})
endforeach()

# Scores are all equal, so the last token takes the first 64 keys of its document, which starts at
# key 100; every logit is 576 / 24, so lse = 24 + ln 64.
add_executable(example_attention ${PROJECT_SOURCE_DIR}/docs/examples/attention.cc)
target_link_libraries(example_attention PRIVATE flashdsa::flashdsa flashdsa_warnings)
add_test(NAME support.Example.attention COMMAND example_attention)
set_tests_properties(support.Example.attention PROPERTIES
  PASS_REGULAR_EXPRESSION "^the last token attends to keys 100\\.\\.163, lse 28\\.1589\n$")
