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

# Sentences that docs/troubleshooting.md explains.
add_test(NAME support.Sentences.StandInTheSources
         COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/check_sentences.py
                 ${PROJECT_SOURCE_DIR})

# Figures of the pages have their rows.
add_test(NAME support.Docs.FiguresHaveRows
         COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/check_figures.py
                 ${PROJECT_SOURCE_DIR})

# Tables of the pages, from the command and from bench/results.
add_test(NAME support.Docs.TablesAreCurrent
         COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/docs/tools/tables.py
                 ${PROJECT_SOURCE_DIR} $<TARGET_FILE:flashdsa_command>)

foreach(checker check_docs check_figures check_includes check_sentences results summary tables
        undocumented)
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

# A row's out is the mean of its keys: (3 + 4 + 5 + 6) / 4 and (3 + 5 + 6 + 7) / 4.
add_executable(example_first_selection ${PROJECT_SOURCE_DIR}/docs/examples/first_selection.cc)
target_link_libraries(example_first_selection PRIVATE flashdsa::flashdsa flashdsa_warnings)
add_test(NAME support.Example.first_selection COMMAND example_first_selection)
string(CONCAT printed
  "^row 0: keys 0 -1 -1 -1, out 0\nrow 2: keys 0 1 2 -1, out 1\nrow 6: keys 3 4 5 6, out 4\\.5\n"
  "row 7: keys 3 5 6 7, out 5\\.25\n"
  "attention_forward: softmax_scale must be a positive finite FP32 number, got 0\n$")
set_tests_properties(support.Example.first_selection PROPERTIES
  PASS_REGULAR_EXPRESSION "${printed}")

# Pictures whose numbers the library computes.
add_executable(plan_text ${CMAKE_CURRENT_LIST_DIR}/drawings/plan_text.cc)
target_link_libraries(plan_text PRIVATE test_support)
add_test(NAME support.Drawings.ShowWhatTheLibraryComputes
         COMMAND Python3::Interpreter -m unittest -v drawings_test
         WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR})
set_tests_properties(support.Drawings.ShowWhatTheLibraryComputes PROPERTIES ENVIRONMENT
  "FLASHDSA_BIN=$<TARGET_FILE:flashdsa_command>;PLAN_TEXT=$<TARGET_FILE:plan_text>")
