# The commit that results name, as of configuring.
find_package(Git QUIET)
set(FLASHDSA_COMMIT unknown)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --dirty
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE description
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(FLASHDSA_COMMIT ${description})
  endif()
endif()
set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/bench.cc PROPERTIES
  COMPILE_DEFINITIONS FLASHDSA_COMMIT="${FLASHDSA_COMMIT}")
