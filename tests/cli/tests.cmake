# The command: its parts as C++ tests, the program itself from Python.

file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_test.cc)
add_executable(cli_tests ${sources})
target_link_libraries(cli_tests PRIVATE flashdsa_tools flashdsa_warnings GTest::gtest_main)
add_library(peer_stub MODULE ${CMAKE_CURRENT_LIST_DIR}/peer_stub.cc)
target_include_directories(peer_stub PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_features(peer_stub PRIVATE cxx_std_20)
set_target_properties(peer_stub PROPERTIES CXX_VISIBILITY_PRESET default)
target_link_libraries(peer_stub PRIVATE flashdsa_warnings)
add_dependencies(cli_tests peer_stub)
target_compile_definitions(cli_tests PRIVATE FLASHDSA_PEER_STUB="$<TARGET_FILE:peer_stub>")
gtest_discover_tests(cli_tests TEST_PREFIX cli. DISCOVERY_TIMEOUT 120)

set(Python3_FIND_UNVERSIONED_NAMES FIRST)  # the python3 of the PATH
find_package(Python3 REQUIRED COMPONENTS Interpreter)
file(GLOB programs CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_LIST_DIR}
     ${CMAKE_CURRENT_LIST_DIR}/test_*.py)
foreach(program IN LISTS programs)
  string(REGEX REPLACE "^test_(.*)\\.py$" "\\1" name ${program})
  add_test(NAME cli.command.${name}
           COMMAND Python3::Interpreter -m unittest -v test_${name}
           WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR})
  set_tests_properties(cli.command.${name} PROPERTIES TIMEOUT 3600 SKIP_RETURN_CODE 77 ENVIRONMENT
    "FLASHDSA_BIN=$<TARGET_FILE:flashdsa_command>;FLASHDSA_CHECK=;FLASHDSA_SANITIZE=${FLASHDSA_SANITIZE}")
endforeach()
